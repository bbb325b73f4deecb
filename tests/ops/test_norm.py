"""Normalisations: native at ratio 0; pruned, every gradient is that of the pruned normalised input."""

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

import surgeon_fx
from surgeon_fx.kernels import unavailable_reason
from surgeon_fx.ops import norm
from surgeon_fx.planner import facts


def wide(*shape, **options):
    """Away from the mean and the deviation that a norm would leave alone."""
    x = tensor(*shape, **options)
    x.data.mul_(3).add_(2)
    return x


# operation, native function, shape, arguments between input and weight, options after the bias, normalised dimensions
CASES = {
    "batch 0d": ("batch_norm", (133, 33), (None, None), {"training": True}, [0]),
    "batch 1d": ("batch_norm", (14, 7, 33), (None, None), {"training": True}, [0, 2]),
    "batch 2d": ("batch_norm", (3, 7, 9, 11), (None, None), {"training": True, "eps": 1e-3}, [0, 2, 3]),
    "batch 3d": ("batch_norm", (2, 3, 7, 7, 7), (None, None), {"training": True}, [0, 2, 3, 4]),
    "instance 1d": ("instance_norm", (14, 7, 33), (None, None), {}, [2]),
    "instance 2d": ("instance_norm", (4, 7, 9, 11), (None, None), {"eps": 1e-3}, [2, 3]),
    "layer": ("layer_norm", (7, 14, 33), ([33],), {}, [2]),
    "layer of two": ("layer_norm", (14, 7, 33), ([7, 33],), {"eps": 1e-3}, [1, 2]),
    "group": ("group_norm", (4, 6, 9, 11), (3,), {}, [2, 3, 4]),
    "group 1d": ("group_norm", (14, 6, 33), (1,), {"eps": 1e-3}, [2, 3]),
    "rms": ("rms_norm", (33, 7, 33), ([33],), {"eps": 1e-5}, [2]),
    "rms of two": ("rms_norm", (33, 7, 33), ((7, 33),), {}, [1, 2]),
}


def case(name, dtype=torch.float32, trains=True, affine=True, layout=torch.contiguous_format):
    function, shape, before, options, dims = CASES[name]
    x = wide(*shape, dtype=dtype, layout=layout)
    sizes = shape[1:2] if function in ("batch_norm", "instance_norm", "group_norm") else before[0]
    named = {"weight": parameter(*sizes, dtype=dtype, trains=trains)} if affine else {}
    if affine and function != "rms_norm":
        named["bias"] = parameter(*sizes, dtype=dtype, trains=trains)
    return getattr(norm, function), getattr(F, function), (x, *before), named, options, dims


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("trains", "affine"), [(True, True), (False, True), (True, False)])
def test_exact_at_ratio_zero(layers, name, trains, affine):
    op, native, args, named, options, _ = case(name, trains=trains, affine=affine)
    check_exact(layers.a, op, native, *args, **named, **options)


def reference(name, x, weight, bias, g, ratio, dims, eps):
    """Gradients by input, weight and bias, by the formula, with x-hat pruned; and x-hat."""
    shape, groups = x.shape, CASES[name][2][0] if name.startswith("group") else None
    weight = torch.ones((), dtype=x.dtype) if weight is None else weight.detach()
    if not name.startswith(("layer", "rms")):
        weight = weight.view(-1, *[1] * (x.dim() - 2)) if weight.dim() else weight

    def grouped(t):
        return t.reshape(shape[0], groups, -1, *shape[2:]) if groups else t

    x = grouped(x.detach())
    if name.startswith("rms"):
        mean, rstd = 0, (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    else:
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        rstd = (variance + eps).rsqrt()
    hat = pruned_by_hand((x - mean) * rstd, ratio)
    gw = grouped(g * weight)
    centred = gw if name.startswith("rms") else gw - gw.mean(dims, keepdim=True)
    dx = rstd * (centred - hat * (gw * hat).mean(dims, keepdim=True))
    broadcast = [d for d in range(len(shape)) if weight.expand(shape).stride(d) == 0]
    return dx.reshape(shape), (g * hat.reshape(shape)).sum(broadcast), g.sum(broadcast)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("trains", "affine"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pruned(layers, name, trains, affine, dtype):
    op, native, args, named, options, dims = case(name, dtype, trains, affine)
    layers.ratios["a"] = 0.8
    actual = gradients(lambda *a, **k: op(layers.a, *a, **k), *args, **named, **options)
    expected = gradients(native, *args, **named, **options)
    assert torch.equal(actual["output"], expected["output"])
    assert actual.keys() == expected.keys()
    eps = options.get("eps", torch.finfo(dtype).eps if name == "rms of two" else 1e-5)
    g = output_gradient(args[0].shape, dtype)
    dx, dw, db = reference(name, args[0], named.get("weight"), named.get("bias"), g, 0.8, dims, eps)
    torch.testing.assert_close(actual["0"], dx, atol=2e-5, rtol=1e-4)
    if "weight" in actual:
        torch.testing.assert_close(actual["weight"], dw.view_as(actual["weight"]), atol=2e-5, rtol=1e-4)
    if "bias" in actual:
        torch.testing.assert_close(actual["bias"], db.view_as(actual["bias"]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_half_precision(layers, name):
    op, native, args, named, options, dims = case(name, torch.bfloat16)
    check_exact(layers.a, op, native, *args, double=False, **named, **options)
    layers.ratios["a"] = 0.8
    actual = gradients(lambda *a, **k: op(layers.a, *a, **k), *args, **named, **options)
    expected = gradients(native, *args, **named, **options)
    assert torch.equal(actual["output"], expected["output"])
    eps = options.get("eps", 1e-5)
    g, (x, *_) = output_gradient(args[0].shape, torch.bfloat16).float(), args
    weight = named["weight"].float()
    dx, _, _ = reference(name, x.float(), weight, None, g, 0.8, dims, eps)
    assert (actual["0"].float() - dx).norm() < 0.1 * dx.norm()  # not the same elements are kept where they are equal


@pytest.mark.parametrize("name", ["batch 2d", "instance 2d", "group"])
def test_channels_last(layers, name):
    op, native, args, named, options, dims = case(name, layout=torch.channels_last)
    check_exact(layers.a, op, native, *args, **named, **options)
    layers.ratios["a"] = 0.8
    actual = gradients(lambda *a, **k: op(layers.a, *a, **k), *args, **named, **options)
    assert torch.equal(actual["output"], gradients(native, *args, **named, **options)["output"])
    eps, g = options.get("eps", 1e-5), output_gradient(args[0].shape)
    dx, dw, _ = reference(name, args[0], named["weight"], None, g, 0.8, dims, eps)
    torch.testing.assert_close(actual["0"], dx, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(actual["weight"], dw.flatten(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["batch 2d", "layer", "group", "rms"])
def test_held_bytes(layers, name):
    op, _, (x, *before), named, options, dims = case(name)
    layers.ratios["a"] = 0.8
    out = op(layers.a, x, *before, **named, **options)
    sizes = x.unflatten(1, (3, 2)).shape if name == "group" else x.shape
    normalised = torch.Size([sizes[d] for d in dims]).numel()
    assert held(out, *named.values()) == pruned_bytes(x, 0.8) + 4 * x.numel() // normalised  # one deviation each


class TestRunningStatistics:
    def case(self, trains=True):
        x, mean, variance = wide(3, 7, 9, 11), tensor(7, trains=False), tensor(7, trains=False).abs() + 0.5
        return (x, mean, variance), {"weight": parameter(7, trains=trains), "bias": parameter(7, trains=trains)}

    @pytest.mark.parametrize("trains", [True, False])
    def test_exact_at_ratio_zero(self, layers, trains):
        args, named = self.case(trains)
        check_exact(layers.a, norm.batch_norm, F.batch_norm, *args, **named)
        check_exact(layers.a, norm.batch_norm, F.batch_norm, *args)

    def test_pruned(self, layers):
        layers.ratios["a"] = 0.8
        args, named = self.case()
        actual = gradients(lambda *a, **k: norm.batch_norm(layers.a, *a, **k), *args, **named)
        expected = gradients(F.batch_norm, *args, **named)
        x, mean, variance = args
        hat = (x.detach() - mean.view(-1, 1, 1)) / (variance + 1e-5).sqrt().view(-1, 1, 1)
        dw = (output_gradient(x.shape) * pruned_by_hand(hat, 0.8)).sum((0, 2, 3))
        torch.testing.assert_close(actual.pop("weight"), dw)
        torch.testing.assert_close(actual.pop("0"), expected.pop("0"))
        expected.pop("weight")
        assert_same(actual, expected)

    @pytest.mark.parametrize("ratio", [0.0, 0.8])
    def test_frozen_keeps_nothing(self, layers, ratio):
        layers.ratios["a"] = ratio
        args, named = self.case(trains=False)
        assert held(norm.batch_norm(layers.a, *args, **named), *args[1:], *named.values()) == 0

    def test_training_moves_them_as_torch_does(self, layers):
        layers.ratios["a"] = 0.8
        for op, native in ((norm.batch_norm, F.batch_norm), (norm.instance_norm, F.instance_norm)):
            training = {"training": True} if native is F.batch_norm else {"use_input_stats": True}
            (x, *stats), named = self.case()
            ours, theirs = [s.clone() for s in stats], [s.clone() for s in stats]
            op(layers.a, x, *ours, **named, **training)
            native(x, *theirs, **named, **training)
            for one, other, before in zip(ours, theirs, stats, strict=True):
                assert torch.equal(one, other)
                assert not torch.equal(one, before)


@pytest.mark.parametrize("ratio", [0.0, 0.8])
def test_one_value_per_channel_is_refused_as_torch_does(layers, ratio):
    layers.ratios["a"] = ratio
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm.batch_norm(layers.a, wide(1, 1033), None, None, training=True)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        norm.instance_norm(layers.a, wide(3, 1033, 1))


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_nan(layers, name):
    op, _, args, named, options, _ = case(name)
    layers.ratios["a"] = 0.8
    args[0].data.view(-1)[5] = torch.nan
    assert gradients(lambda *a, **k: op(layers.a, *a, **k), *args, **named, **options)["0"].isnan().any()


@pytest.mark.parametrize("name", CASES)
def test_double_backward_is_refused(layers, name):
    op, _, args, named, options, _ = case(name)
    layers.ratios["a"] = 0.8
    with pytest.raises(RuntimeError, match="double backward"):
        gradients(lambda *a, **k: op(layers.a, *a, **k), *args, **named, **options, double=True)


@pytest.mark.skipif(bool(unavailable_reason("cpu", "cpu")), reason="no C kernels here")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [torch.nn.BatchNorm2d(8), torch.nn.LayerNorm([32, 32]), torch.nn.GroupNorm(4, 8)],
    ids=lambda x: type(x).__name__,
)
def test_no_dense_normalised_input_beside_the_output(layer, training):
    model = surgeon_fx.transform(torch.nn.Sequential(layer).train(training))
    timeline = facts.step(model, [(4, 8, 32, 32)], {}, 0.9, backward=False).timeline
    dense = 4 * 8 * 32 * 32 * 4
    assert dense < max(live for _, live in timeline) < 1.3 * dense
