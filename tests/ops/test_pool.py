"""Pools: half a byte per output, a byte where windows are large, or nothing; exact at any ratio."""

import math

import pytest
import torch
import torch.nn.functional as F
from op_cases import assert_same, check_exact, gradients, held, tensor

from surgeon_fx.ops import pool

# function, shape, arguments, bytes held per output
CASES = {
    "max 1d": ("max_pool1d", (2, 3, 133), {"kernel_size": 3, "stride": 2, "padding": 1}, 0.5),
    "max 1d, no stride": ("max_pool1d", (2, 3, 133), {"kernel_size": (7,)}, 0.5),
    "max 2d": ("max_pool2d", (2, 3, 33, 17), {"kernel_size": 3, "stride": 2, "padding": 1}, 0.5),
    "max 2d, ceil": ("max_pool2d", (2, 3, 34, 18), {"kernel_size": (3, 2), "stride": (2, 3), "ceil_mode": True}, 0.5),
    "max 2d, dilated": (
        "max_pool2d",
        (2, 3, 33, 17),
        {"kernel_size": [2, 3], "dilation": (3, 2), "padding": (1, 0)},
        0.5,
    ),
    "max 2d, of many": ("max_pool2d", (2, 3, 33, 33), {"kernel_size": 4}, 1),
    "max 2d, of all": ("max_pool2d", (2, 3, 33, 33), {"kernel_size": 33}, 2),
    "max 3d": ("max_pool3d", (2, 3, 7, 9, 11), {"kernel_size": 3, "stride": 2, "padding": 1}, 1),
    "adaptive max 1d": ("adaptive_max_pool1d", (2, 3, 133), {"output_size": 7}, 1),
    "adaptive max 2d": ("adaptive_max_pool2d", (2, 3, 33, 17), {"output_size": (7, None)}, 2),
    "adaptive max 3d": ("adaptive_max_pool3d", (2, 3, 7, 9, 11), {"output_size": 2}, 2),
    "average 1d": ("avg_pool1d", (2, 3, 133), {"kernel_size": 3, "stride": 2, "padding": 1}, 0),
    "average 2d": ("avg_pool2d", (2, 3, 33, 17), {"kernel_size": 3, "count_include_pad": False, "padding": 1}, 0),
    "average 2d, divided": ("avg_pool2d", (2, 3, 33, 17), {"kernel_size": (3, 2), "divisor_override": 5}, 0),
    "average 3d": ("avg_pool3d", (2, 3, 7, 9, 11), {"kernel_size": 2, "ceil_mode": True}, 0),
    "adaptive average 1d": ("adaptive_avg_pool1d", (2, 3, 133), {"output_size": 7}, 0),
    "adaptive average 2d": ("adaptive_avg_pool2d", (2, 3, 33, 17), {"output_size": (7, None)}, 0),
    "adaptive average 2d to one": ("adaptive_avg_pool2d", (2, 3, 33, 17), {"output_size": 1}, 0),
    "adaptive average 3d": ("adaptive_avg_pool3d", (2, 3, 7, 9, 11), {"output_size": (2, 3, 4)}, 0),
}


def functions(name):
    function, shape, options, per_output = CASES[name]
    return getattr(pool, function), getattr(F, function), shape, options, per_output


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exact(layers, name, dtype):
    op, native, shape, options, _ = functions(name)
    if name == "average 3d" and dtype == torch.bfloat16:
        pytest.skip("torch has none")
    layers.ratios["a"] = 0.9
    check_exact(layers.a, op, native, tensor(*shape, dtype=dtype), double=dtype != torch.bfloat16, **options)
    check_exact(layers.a, op, native, tensor(*shape[1:], dtype=dtype), double=False, **options)  # one sample


@pytest.mark.parametrize("name", CASES)
def test_held_bytes(layers, name):
    op, _, shape, options, per_output = functions(name)
    out = op(layers.a, tensor(*shape), **options)
    assert held(out) == math.ceil(per_output * out.numel())


@pytest.mark.parametrize("name", [name for name in CASES if "2d" in name])
def test_channels_last(layers, name):
    op, native, shape, options, _ = functions(name)
    check_exact(layers.a, op, native, tensor(*shape, layout=torch.channels_last), **options)


@pytest.mark.parametrize("name", [name for name in CASES if "max" in name])
def test_indices(layers, name):
    op, native, shape, options, _ = functions(name)
    x = tensor(*shape)
    for with_indices in (op, getattr(pool, f"{op.__name__}_with_indices", op)):
        out, indices = with_indices(layers.a, x, **options, return_indices=True)
        expected, expected_indices = native(x, **options, return_indices=True)
        assert torch.equal(out, expected)
        assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("name", [name for name in CASES if "max" in name])
def test_nan_and_equals(layers, name):
    op, native, shape, options, _ = functions(name)
    poisoned = tensor(*shape)
    poisoned.data.view(-1)[::5] = torch.nan
    for x in (poisoned, torch.zeros(shape).requires_grad_(), torch.full(shape, -torch.inf).requires_grad_()):
        ours = gradients(lambda x: op(layers.a, x, **options), x)
        assert torch.equal(ours["0"], gradients(native, x, **options)["0"])


def test_positions(layers):
    x = tensor(2, 3, 33, 17)
    assert torch.equal(pool.max_pool2d(layers.a, x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
    assert torch.equal(pool.avg_pool2d(layers.a, x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1))
    assert torch.equal(pool.avg_pool2d(layers.a, x.detach(), 3, None), F.avg_pool2d(x, 3))
    assert torch.equal(pool.adaptive_max_pool1d(layers.a, x[0].detach(), 5), F.adaptive_max_pool1d(x[0], 5))


RECTIFIED = [name for name in CASES if name.startswith("max")]


def rectified(layers, name, rectify):
    """The pool that takes a ReLU in, and the two as torch has them."""
    op, native, shape, options, per_output = functions(name)
    ours = lambda x: op(layers.a, x.clone() if rectify == "relu_" else x, **options, rectify=rectify)  # noqa: E731
    return ours, lambda x: native(torch.relu(x), **options), shape, per_output


@pytest.mark.parametrize("name", RECTIFIED)
@pytest.mark.parametrize("rectify", ["relu", "relu_"])
def test_rectified(layers, name, rectify):
    ours, native, shape, _ = rectified(layers, name, rectify)
    signs, poisoned, negative = tensor(*shape), tensor(*shape), -tensor(*shape).detach().abs()
    poisoned.data.view(-1)[::5] = torch.nan
    poisoned.data.view(-1)[1::7] = torch.inf
    for x in (signs, poisoned, negative.requires_grad_(), torch.zeros(shape).requires_grad_(), tensor(*shape[1:])):
        assert_same(gradients(ours, x, double=True), gradients(native, x, double=True))


@pytest.mark.parametrize("name", [name for name in RECTIFIED if "2d" in name])
def test_rectified_channels_last(layers, name):
    ours, native, shape, _ = rectified(layers, name, "relu")
    x = tensor(*shape, layout=torch.channels_last)
    assert_same(gradients(ours, x), gradients(native, x))


@pytest.mark.parametrize("name", RECTIFIED)
def test_rectified_meets_gradients_that_are_not_finite(layers, name):
    ours, native, shape, _ = rectified(layers, name, "relu")
    found = []
    for function in (ours, native):
        x = tensor(*shape)
        out = function(x)
        g = torch.ones_like(out)
        g.view(-1)[::3], g.view(-1)[1::3] = torch.inf, torch.nan
        found.append({"x": torch.autograd.grad(out, x, g)[0]})
    assert_same(*found)


@pytest.mark.parametrize("name", RECTIFIED)
def test_rectified_keeps_no_bits(layers, name):
    ours, _, shape, per_output = rectified(layers, name, "relu")
    x = tensor(*shape)
    out = ours(x)
    bits = (x.numel() + 7) // 8 if name == "max 2d, of all" else 0  # windows too large: each by itself
    assert held(out) == math.ceil(per_output * out.numel()) + bits
