"""Smooth functions: native at ratio 0; pruned, the gradient of the pruned input or output."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    check_exact,
    gradients,
    held,
    output_gradient,
    parameter,
    pruned_by_hand,
    pruned_bytes,
    tensor,
)

from surgeon_fx.ops import smooth

OF_INPUT = {
    "gelu": (smooth.gelu, F.gelu, {}),
    "gelu of tanh": (smooth.gelu, F.gelu, {"approximate": "tanh"}),
    "silu": (smooth.silu, F.silu, {}),
    "silu in place": (smooth.silu, F.silu, {"inplace": True}),
    "hardswish": (smooth.hardswish, F.hardswish, {}),
    "hardswish in place": (smooth.hardswish, F.hardswish, {"inplace": True}),
    "mish": (smooth.mish, F.mish, {}),
    "mish in place": (smooth.mish, F.mish, {"inplace": True}),
    "softplus": (smooth.softplus, F.softplus, {}),
    "softplus of two": (smooth.softplus, F.softplus, {"beta": 2, "threshold": 1.5}),
    "elu": (smooth.elu, F.elu, {"alpha": 1.3}),
    "elu in place": (smooth.elu, F.elu, {"inplace": True}),
    "celu": (smooth.celu, F.celu, {"alpha": 1.3}),
    "celu in place": (smooth.celu, F.celu, {"inplace": True}),
    "selu": (smooth.selu, F.selu, {}),
    "selu in place": (smooth.selu, F.selu, {"inplace": True}),
    "logsigmoid": (smooth.logsigmoid, F.logsigmoid, {}),
    "softsign": (smooth.softsign, F.softsign, {}),
    "tanhshrink": (smooth.tanhshrink, F.tanhshrink, {}),
    "glu": (smooth.glu, F.glu, {}),
    "glu of a dimension": (smooth.glu, F.glu, {"dim": 1}),
    "square": (smooth.square, torch.square, {}),
    "sin": (smooth.sin, torch.sin, {}),
    "cos": (smooth.cos, torch.cos, {}),
    "pow": (smooth.pow, torch.pow, {"exponent": 3}),
    "pow of a float": (smooth.pow, torch.pow, {"exponent": 2.0}),
}
OF_OUTPUT = {
    "sigmoid": (smooth.sigmoid, torch.sigmoid, lambda g, y: g * y * (1 - y)),
    "tanh": (smooth.tanh, torch.tanh, lambda g, y: g * (1 - y * y)),
    "exp": (smooth.exp, torch.exp, lambda g, y: g * y),
}
SHAPE = (3, 34, 34)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*OF_INPUT, *OF_OUTPUT])
def test_exact_at_ratio_zero(layers, name, dtype):
    op, native, options = OF_INPUT.get(name) or (*OF_OUTPUT[name][:2], {})
    double = dtype == torch.float32 and "inplace" not in options
    check_exact(layers.a, op, native, tensor(*SHAPE, dtype=dtype), double=double, **options)
    check_exact(layers.a, op, native, tensor(2, 2, 2, dtype=dtype), double=double, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OF_INPUT)
def test_pruned_input(layers, name, dtype):
    op, native, options = OF_INPUT[name]
    x = tensor(*SHAPE, dtype=dtype)
    layers.ratios["a"] = 0.7
    actual = gradients(lambda x, **k: op(layers.a, x, **k), x, **options)
    assert torch.equal(actual["output"], gradients(native, x, **options)["output"])
    options_of_reference = {name: value for name, value in options.items() if name != "inplace"}
    expected = gradients(native, pruned_by_hand(x, 0.7).requires_grad_(), **options_of_reference)
    torch.testing.assert_close(actual["0"], expected["0"])
    out = op(layers.a, x.clone(), **options)
    assert held(out) == pruned_bytes(x, 0.7)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("name", OF_OUTPUT)
def test_pruned_output(layers, name):
    op, native, formula = OF_OUTPUT[name]
    x = tensor(*SHAPE)
    layers.ratios["a"] = 0.7
    actual = gradients(lambda x: op(layers.a, x), x)
    assert torch.equal(actual["output"], native(x))
    kept = pruned_by_hand(actual["output"], 0.7)
    torch.testing.assert_close(actual["0"], formula(output_gradient(SHAPE), kept))
    assert held(op(layers.a, x)) == pruned_bytes(x, 0.7)


@pytest.mark.parametrize("name", [*OF_INPUT, *OF_OUTPUT])
def test_channels_last(layers, name):
    op, native, options = OF_INPUT.get(name) or (*OF_OUTPUT[name][:2], {})
    x = tensor(3, 4, 14, 14, layout=torch.channels_last)
    check_exact(layers.a, op, native, x, double=False, **options)
    layers.ratios["a"] = 0.7
    out = op(layers.a, x.clone(), **options)
    assert out.stride() == native(x.clone(), **options).stride()
    assert held(out) == pruned_bytes(x, 0.7)


@pytest.mark.parametrize("exponent", [0.5, 1, 1.5, -2, "tensor"])
def test_other_powers_are_native(layers, exponent):
    """Their gradient at 0 is infinite, or says nothing: what is dropped would count."""
    layers.ratios["a"] = 0.7
    exponent = tensor(34, seed=3).abs() if exponent == "tensor" else exponent
    x = tensor(*SHAPE).detach().abs().add(0.1).requires_grad_()
    check_exact(layers.a, smooth.pow, torch.pow, x, exponent)
    assert torch.equal(smooth.pow(layers.a, 2.0, x), 2.0**x)


@pytest.mark.parametrize("size", [1, 4])
def test_prelu(layers, size):
    x, weight = tensor(9, 4, 33), parameter(size)
    check_exact(layers.a, smooth.prelu, F.prelu, x, weight)
    check_exact(layers.a, smooth.prelu, F.prelu, tensor(1033), parameter(1))
    layers.ratios["a"] = 0.7
    actual = gradients(lambda *a: smooth.prelu(layers.a, *a), x, weight)
    expected = gradients(F.prelu, pruned_by_hand(x, 0.7).requires_grad_(), weight)
    for name in ("0", "1"):
        torch.testing.assert_close(actual[name], expected[name])
    assert torch.equal(actual["output"], F.prelu(x, weight))
    assert held(smooth.prelu(layers.a, x, weight), weight) == pruned_bytes(x, 0.7)


def test_nan_stays_nan(layers):
    layers.ratios["a"] = 0.7
    x = tensor(*SHAPE)
    x.data[0, 0, 0] = torch.nan
    for name in ("gelu", "silu", "softplus"):
        op, _, options = OF_INPUT[name]
        assert gradients(lambda x, op=op, options=options: op(layers.a, x, **options), x)["0"][0, 0, 0].isnan()


def test_integers_are_native(layers):
    whole = torch.arange(5)
    assert torch.equal(smooth.square(layers.a, whole), whole**2)
    assert torch.equal(smooth.pow(layers.a, whole, 2), whole**2)
