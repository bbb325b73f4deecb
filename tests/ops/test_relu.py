"""ReLU and its kin, clamp: one bit per element, exact at any ratio."""

import math

import pytest
import torch
import torch.nn.functional as F
from op_cases import check_exact, gradients, held, tensor

from surgeon_fx.ops import relu

CASES = {
    "relu": (relu.relu, F.relu, {}),
    "relu in place": (relu.relu, F.relu, {"inplace": True}),
    "relu_": (relu.relu_, torch.relu_, {}),
    "relu6": (relu.relu6, F.relu6, {}),
    "relu6 in place": (relu.relu6, F.relu6, {"inplace": True}),
    "leaky": (relu.leaky_relu, F.leaky_relu, {}),
    "leaky, steep": (relu.leaky_relu, F.leaky_relu, {"negative_slope": 1.5}),
    "leaky, falling": (relu.leaky_relu, F.leaky_relu, {"negative_slope": -0.2}),
    "leaky in place": (relu.leaky_relu, F.leaky_relu, {"negative_slope": 0.2, "inplace": True}),
    "leaky_": (relu.leaky_relu_, F.leaky_relu_, {"negative_slope": 0.1}),
    "threshold": (relu.threshold, F.threshold, {"threshold": 0.5, "value": -3.0}),
    "threshold in place": (relu.threshold, F.threshold, {"threshold": 0.0, "value": 20.0, "inplace": True}),
    "hardtanh": (relu.hardtanh, F.hardtanh, {}),
    "hardtanh of a range": (relu.hardtanh, F.hardtanh, {"min_val": -0.5, "max_val": 1.5}),
    "hardtanh in place": (relu.hardtanh, F.hardtanh, {"max_val": 0.5, "inplace": True}),
    "hardsigmoid": (relu.hardsigmoid, F.hardsigmoid, {}),
    "hardsigmoid in place": (relu.hardsigmoid, F.hardsigmoid, {"inplace": True}),
    "clamp": (relu.clamp, torch.clamp, {"min": -1, "max": 1.0}),
    "clamp from": (relu.clamp, torch.clamp, {"min": 0}),
    "clamp to": (relu.clamp, torch.clamp, {"max": 0.5}),
    "clamp_min": (relu.clamp_min, torch.clamp_min, {"min": 0.0}),
    "clamp_max": (relu.clamp_max, torch.clamp_max, {"max": 1}),
}
EDGES = [-math.inf, -6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 3.0, 6.0, math.inf]
UNDECIDED_AT_NAN = (
    "relu6",
    "hardtanh",
    "hardsigmoid",
)  # torch's kernels differ between the body and the end of a tensor


def edges(name, dtype):
    nan = [] if name.startswith(UNDECIDED_AT_NAN) else [math.nan]
    return torch.tensor([*EDGES, *nan] * 100, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_exact_at_any_ratio(layers, name, ratio, dtype):
    op, native, options = CASES[name]
    layers.ratios["a"] = ratio
    for x in (tensor(7, 33, 7, dtype=dtype), tensor(1, dtype=dtype), edges(name, dtype)):
        double = "inplace" not in options and not name.endswith("_") and name != "hardsigmoid"  # torch has none
        check_exact(layers.a, op, native, x, double=double, **options)


@pytest.mark.parametrize("name", CASES)
def test_one_bit_per_element(layers, name):
    op, _, options = CASES[name]
    x = tensor(7, 33, 7)
    assert held(op(layers.a, x.clone(), **options)) == (x.numel() + 7) // 8


@pytest.mark.parametrize("name", CASES)
def test_layouts(layers, name):
    """Channels-last, a slice, and a tensor that repeats itself in memory."""
    op, native, options = CASES[name]
    layers.ratios["a"] = 0.9
    if "inplace" in options or name.endswith("_"):
        return check_exact(
            layers.a, op, native, tensor(3, 5, 7, 7, layout=torch.channels_last), double=False, **options
        )
    views = (lambda x: x, lambda x: x[:, ::2, 1:], lambda x: x.transpose(1, 2), lambda x: x[:1].expand(9, -1, -1, -1))
    for view in views:

        def ours(x, view=view):
            return op(layers.a, view(x), **options)

        def theirs(x, view=view):
            return native(view(x), **options)

        x = tensor(3, 5, 7, 7, layout=torch.channels_last)
        actual, expected = gradients(ours, x), gradients(theirs, x)
        assert torch.equal(actual["output"], expected["output"])
        torch.testing.assert_close(actual["0"], expected["0"], rtol=0, atol=1e-6)  # repeated elements are summed


def test_in_place_changes_its_input(layers):
    x = tensor(7, 33)
    h = x.clone()
    out = relu.relu(layers.a, h, inplace=True)
    assert out is h
    assert out.min() == 0
    before = x.clone()
    part = before[:, :5]
    relu.relu_(layers.a, part)  # of a view: the whole is changed, and its gradient
    (ours,) = torch.autograd.grad(before.sum(), x)
    before = x.clone()
    torch.relu_(before[:, :5])
    assert torch.equal(ours, torch.autograd.grad(before.sum(), x)[0])


def test_a_leaf_is_not_changed_in_place(layers):
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        relu.relu_(layers.a, tensor(7))


def test_tensor_bounds_and_integers_are_native(layers):
    low, high = tensor(7, 33, seed=3), tensor(33, seed=4)
    check_exact(layers.a, relu.clamp, torch.clamp, tensor(7, 33), min=low, max=high, double=False)
    whole = torch.arange(-5, 5)
    assert torch.equal(relu.clamp(layers.a, whole, 0, 3), whole.clamp(0, 3))
    assert torch.equal(relu.relu(layers.a, whole), whole.relu())
