"""Convolutions: native at ratio 0; pruned, only the weight gradient reads the pruned input."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    assert_same,
    check_exact,
    gradients,
    held,
    output_gradient,
    parameter,
    pruned_by_hand,
    pruned_bytes,
    tensor,
)

from surgeon_fx.ops import conv

# name of the function, shape of input and weight, options
CASES = {
    "1d": ("conv1d", (7, 3, 64), (5, 3, 3), {}),
    "1d one channel": ("conv1d", (1, 1, 1033), (1, 1, 7), {"stride": 3}),
    "2d": ("conv2d", (2, 3, 17, 33), (5, 3, 3, 3), {"padding": 1}),
    "2d of everything": ("conv2d", (2, 4, 20, 21), (6, 2, 3, 2), {"stride": (2, 1), "dilation": 2, "groups": 2}),
    "2d same": ("conv2d", (2, 3, 17, 33), (5, 3, 4, 3), {"padding": "same"}),
    "2d valid": ("conv2d", (2, 3, 17, 33), (5, 3, 4, 3), {"padding": "valid", "stride": (2,)}),
    "2d of one sample": ("conv2d", (3, 33, 33), (5, 3, 3, 3), {"padding": (1, 0)}),
    "2d depthwise": ("conv2d", (2, 6, 15, 15), (6, 1, 3, 3), {"groups": 6}),
    "3d": ("conv3d", (2, 2, 7, 9, 11), (3, 2, 2, 3, 1), {"padding": (0, 1, 0)}),
    "transposed 1d": ("conv_transpose1d", (4, 4, 70), (4, 6, 3), {"stride": 2}),
    "transposed 2d": (
        "conv_transpose2d",
        (2, 4, 13, 17),
        (4, 3, 3, 3),
        {"stride": 2, "output_padding": 1, "groups": 2},
    ),
    "transposed 3d": ("conv_transpose3d", (2, 3, 7, 7, 7), (3, 2, 2, 2, 2), {"dilation": 2}),
    "transposed one sample": ("conv_transpose2d", (4, 17, 17), (4, 3, 2, 2), {"stride": [2, 2]}),
}


def case(name, dtype=torch.float32, layout=torch.contiguous_format, trains=True):
    function, shape, weight, options = CASES[name]
    channels = weight[1] * options.get("groups", 1) if "transpose" in function else weight[0]
    tensors = (
        tensor(*shape, dtype=dtype, layout=layout),
        parameter(*weight, dtype=dtype, trains=trains),
        parameter(channels, dtype=dtype),
    )
    return getattr(conv, function), getattr(F, function), tensors, options


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("trains", [True, False])
def test_exact_at_ratio_zero(layers, name, trains):
    op, native, tensors, options = case(name, trains=trains)
    check_exact(layers.a, op, native, *tensors, **options)


@pytest.mark.parametrize("name", CASES)
def test_pruned(layers, name):
    op, native, (x, weight, bias), options = case(name)
    layers.ratios["a"] = 0.9
    actual = gradients(lambda *args: op(layers.a, *args, **options), x, weight, bias)
    expected = gradients(lambda *args: native(*args, **options), x, weight, bias)
    kept = pruned_by_hand(x, 0.9)
    if name == "2d same":  # what is kept is the padded input, zeros included
        kept = pruned_by_hand(F.pad(x, (0, 0, 0, 1)), 0.9)[..., :-1, :]
    of_pruned = gradients(lambda *args: native(*args, **options), kept.requires_grad_(), weight, bias)
    torch.testing.assert_close(actual.pop("1"), of_pruned["1"])
    expected.pop("1")
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(layers, dtype):
    op, native, tensors, options = case("2d", dtype)
    check_exact(layers.a, op, native, *tensors, double=False, **options)
    layers.ratios["a"] = 0.9
    actual = gradients(lambda *args: op(layers.a, *args, **options), *tensors)
    expected = gradients(lambda *args: native(*args, **options), *tensors)
    of_pruned = gradients(lambda *args: native(*args, **options), pruned_by_hand(tensors[0], 0.9), *tensors[1:])
    torch.testing.assert_close(actual.pop("1"), of_pruned["1"])
    expected.pop("1")
    assert_same(actual, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, torch.channels_last_3d])
@pytest.mark.parametrize(
    ("shape", "kernel"), [((2, 9, 130), (5,)), ((2, 4, 24, 6), (4, 2)), ((1, 5, 8, 6, 6), (2, 2, 3))]
)
def test_the_input_gradient_of_patches_is_one_product(layers, shape, kernel, layout, monkeypatch):
    if layout is not torch.contiguous_format and len(shape) != (4 if layout is torch.channels_last else 5):
        pytest.skip("a layout of other dimensions")
    products = []
    product = conv._patch_input_grad
    monkeypatch.setattr(conv, "_patch_input_grad", lambda *args: products.append(args) or product(*args))
    dims = len(kernel)
    op, native = getattr(conv, f"conv{dims}d"), getattr(F, f"conv{dims}d")
    x = tensor(*shape).detach().contiguous(memory_format=layout).requires_grad_()
    weight, bias = parameter(32, shape[1], *kernel), parameter(32)
    layers.ratios["a"] = 0.9
    actual = gradients(lambda *args: op(layers.a, *args, stride=kernel), x, weight, bias)
    assert products
    assert product(*products[0]).is_contiguous(memory_format=layout)
    expected = gradients(lambda *args: native(*args, stride=kernel), x, weight, bias)
    of_pruned = gradients(lambda *args: native(*args, stride=kernel), pruned_by_hand(x, 0.9), weight, bias)
    torch.testing.assert_close(actual, {**expected, "1": of_pruned["1"]})


@pytest.mark.parametrize(
    "options", [{"stride": 2, "padding": 1}, {"stride": 1}, {"stride": 2, "dilation": 2}, {"stride": 2, "groups": 2}]
)
def test_other_kernels_have_the_native_input_gradient(layers, options, monkeypatch):
    monkeypatch.setattr(conv, "_patch_input_grad", None)
    x, weight = tensor(2, 8, 13, 14), parameter(32, 8 // options.get("groups", 1), 2, 2)
    layers.ratios["a"] = 0.9
    actual = gradients(lambda *args: conv.conv2d(layers.a, *args, **options), x, weight)
    expected = gradients(lambda *args: F.conv2d(*args, **options), x, weight)
    torch.testing.assert_close(actual["0"], expected["0"])


def test_channels_last(layers):
    op, native, tensors, options = case("2d", layout=torch.channels_last)
    check_exact(layers.a, op, native, *tensors, **options)
    layers.ratios["a"] = 0.9
    x = tensors[0]
    out = op(layers.a, *tensors, **options)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert held(out, *tensors[1:]) == pruned_bytes(x, 0.9)
    actual = gradients(lambda *args: op(layers.a, *args, **options), *tensors)
    of_pruned = gradients(lambda *args: native(*args, **options), pruned_by_hand(x, 0.9), *tensors[1:])
    torch.testing.assert_close(actual["1"], of_pruned["1"])


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_a_frozen_weight_keeps_nothing(layers, ratio):
    op, _, tensors, options = case("2d", trains=False)
    layers.ratios["a"] = ratio
    assert held(op(layers.a, *tensors, **options), *tensors[1:]) == 0


def test_held_bytes(layers):
    op, _, (x, weight, bias), options = case("2d")
    layers.ratios["a"] = 0.75
    assert held(op(layers.a, x, weight, bias, **options), weight, bias) == pruned_bytes(x, 0.75)


def test_keywords_and_missing_arguments(layers):
    op, native, (x, weight, _), _ = case("2d")
    for ratio in (0.0, 0.9):
        layers.ratios["a"] = ratio
        actual = op(layers.a, weight=weight, input=x, dilation=(1, 2))
        assert torch.equal(actual, native(weight=weight, input=x, dilation=(1, 2)))


def test_nan_reaches_the_weight_gradient(layers):
    op, _, (x, weight, bias), options = case("2d")
    layers.ratios["a"] = 0.9
    x.data[0, 0, 5, 5] = torch.nan
    found = gradients(lambda *args: op(layers.a, *args, **options), x, weight, bias)
    assert found["1"].isnan().any()
    assert not found["2"].isnan().any()


def test_without_a_graph_it_is_the_native_function(layers):
    op, native, (x, weight, bias), options = case("2d")
    layers.ratios["a"] = 0.9
    out = op(layers.a, x.detach(), weight.detach(), bias.detach(), **options)
    assert out.grad_fn is None
    assert torch.equal(out, native(x, weight, bias, **options))


@pytest.mark.parametrize("name", ["2d", "2d of one sample"])
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_elements_are_counted_once(layers, name, ratio):
    op, _, tensors, options = case(name)
    layers.ratios["a"] = ratio
    op(layers.a, *tensors, **options)
    assert layers.slots.by_name["a"].elements == tensors[0].numel()


def test_second_derivatives_of_what_is_not_pruned_are_right_or_refused(layers):
    """An input too small to prune is kept as it is, whatever the ratio."""
    layers.ratios["a"] = 0.9
    x, weight = tensor(1, 3, 7, 7), parameter(2, 3, 3, 3)
    check_exact(layers.a, conv.conv2d, F.conv2d, x, weight)
    large = tensor(2, 3, 33, 33)
    (dw,) = torch.autograd.grad(conv.conv2d(layers.a, large, weight).sum(), weight)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(conv.conv2d(layers.a, large, weight).sum(), weight, create_graph=True)
    g = output_gradient((2, 2, 31, 31)) * 0 + 1
    torch.testing.assert_close(dw, torch.autograd.grad(F.conv2d(pruned_by_hand(large, 0.9), weight), weight, g)[0])
