"""Matrix products with a parameter: native at ratio 0; pruned, only the parameter's gradient reads the pruned input."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import assert_same, check_exact, gradients, held, parameter, pruned_by_hand, pruned_bytes, tensor
from torch import nn

from surgeon_fx.ops import linear

# operation, native function, its tensors, where the activation stands, where the parameter
CASES = {
    "linear": (linear.linear, F.linear, (tensor(33, 7, 7), parameter(5, 7), parameter(5)), 0, 1),
    "linear of one row": (linear.linear, F.linear, (tensor(1033), parameter(5, 1033)), 0, 1),
    "linear to one": (linear.linear, F.linear, (tensor(33, 33), parameter(1, 33), parameter(1)), 0, 1),
    "matmul": (linear.matmul, torch.matmul, (tensor(7, 33, 7), parameter(7, 5)), 0, 1),
    "parameter first": (linear.matmul, torch.matmul, (parameter(5, 33), tensor(7, 33, 7)), 1, 0),
    "batch of parameters": (linear.matmul, torch.matmul, (tensor(3, 7, 33, 7), parameter(7, 7, 5)), 0, 1),
    "mm": (linear.mm, torch.mm, (tensor(33, 33), parameter(33, 7)), 0, 1),
    "bmm": (linear.bmm, torch.bmm, (tensor(7, 33, 7), parameter(7, 7, 3)), 0, 1),
    "addmm": (linear.addmm, torch.addmm, (parameter(5), tensor(33, 33), parameter(33, 5)), 1, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_at_ratio_zero(layers, name):
    op, native, tensors, _, _ = CASES[name]
    check_exact(layers.a, op, native, *tensors)


def check_pruned(key, op, native, tensors, activation, weight):
    actual = gradients(lambda *args: op(key, *args), *tensors)
    expected = gradients(native, *tensors)
    pruned = list(tensors)
    pruned[activation] = pruned_by_hand(tensors[activation], 0.9).requires_grad_()
    of_pruned = gradients(native, *pruned)
    torch.testing.assert_close(actual[str(weight)], of_pruned[str(weight)])
    assert torch.equal(actual["output"], expected["output"])
    for name in expected.keys() - {"output", str(weight)}:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=2e-6)
    return actual, expected


@pytest.mark.parametrize("name", CASES)
def test_pruned(layers, name):
    layers.ratios["a"] = 0.9
    check_pruned(layers.a, *CASES[name])


@pytest.mark.parametrize("shape", [(33, 33), (7, 33, 33)])
def test_input_and_bias_gradients_of_a_linear_layer_are_exact(layers, shape):
    layers.ratios["a"] = 0.9
    tensors = (tensor(*shape), parameter(7, 33), parameter(7))
    actual, expected = check_pruned(layers.a, linear.linear, F.linear, tensors, 0, 1)
    for name in ("0", "2"):
        assert torch.equal(actual[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(layers, dtype):
    tensors = (tensor(33, 7, 33, dtype=dtype), parameter(5, 33, dtype=dtype), parameter(5, dtype=dtype))
    check_exact(layers.a, linear.linear, F.linear, *tensors)
    layers.ratios["a"] = 0.9
    actual = gradients(lambda *args: linear.linear(layers.a, *args), *tensors)
    expected = gradients(F.linear, pruned_by_hand(tensors[0], 0.9), *tensors[1:])
    torch.testing.assert_close(actual["1"], expected["1"])
    assert torch.equal(actual["output"], gradients(F.linear, *tensors)["output"])


EQUATIONS = {
    "bnc,co->bno": ((7, 33, 7), (7, 5)),
    "oc,bcn->bon": ((7, 5), (3, 5, 133)),
    "...c,c->...": ((33, 33), (33,)),
    "bhnd,hdo->bno": ((3, 2, 33, 7), (2, 7, 5)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("as_list", [False, True])
def test_einsum(layers, equation, as_list):
    shapes = EQUATIONS[equation]
    weight = min((0, 1), key=lambda i: torch.Size(shapes[i]).numel())
    tensors = [parameter(*shape) if i == weight else tensor(*shape) for i, shape in enumerate(shapes)]

    def op(key, *operands):
        return linear.einsum(key, equation, list(operands)) if as_list else linear.einsum(key, equation, *operands)

    def native(*operands):
        return torch.einsum(equation, *operands)

    check_exact(layers.a, op, native, *tensors)
    layers.ratios["a"] = 0.9
    check_pruned(layers.a, op, native, tensors, 1 - weight, weight)


@pytest.mark.parametrize("name", CASES)
def test_held_bytes(layers, name):
    op, _, tensors, activation, _ = CASES[name]
    layers.ratios["a"] = 0.9
    own = [x for x in tensors if isinstance(x, nn.Parameter)]
    assert held(op(layers.a, *tensors), *own) == pruned_bytes(tensors[activation], 0.9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_a_frozen_parameter_keeps_no_activation(layers, name, ratio):
    op, _, tensors, activation, weight = CASES[name]
    layers.ratios["a"] = ratio
    tensors = [nn.Parameter(x.detach(), False) if i == weight else x for i, x in enumerate(tensors)]
    out = op(layers.a, *tensors)
    assert held(out) == held(out, tensors[activation])


def test_products_of_two_activations_are_native(layers):
    layers.ratios["a"] = 0.9
    tensors = (tensor(7, 33, 7), tensor(7, 7, 33, seed=3))
    for op, native in ((linear.matmul, torch.matmul), (linear.bmm, torch.bmm)):
        check_exact(layers.a, op, native, *tensors)
    check_exact(layers.a, linear.addmm, torch.addmm, tensor(33, 7), tensor(33, 33), tensor(33, 7, seed=3))
    check_exact(layers.a, linear.addmm, torch.addmm, parameter(7), tensor(33, 33), parameter(33, 7), beta=0.5, alpha=2)


def test_vectors_and_two_parameters_are_native(layers):
    layers.ratios["a"] = 0.9
    check_exact(layers.a, linear.matmul, torch.matmul, tensor(33, 33), parameter(33))
    check_exact(layers.a, linear.matmul, torch.matmul, parameter(33, 33), parameter(33, 7))


def test_views_of_a_parameter_are_parameters(layers):
    layers.ratios["a"] = 0.9
    x, weight = tensor(33, 33), parameter(7, 33)
    out = linear.matmul(layers.a, x, weight.t())
    assert held(out, weight) == pruned_bytes(x, 0.9)
    (dw,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(dw, pruned_by_hand(x, 0.9).sum(0).expand(7, -1))


def test_keywords(layers):
    x, weight, bias = tensor(33, 33), parameter(33, 33), parameter(33)
    for ratio in (0.0, 0.9):
        layers.ratios["a"] = ratio
        assert torch.equal(linear.linear(layers.a, bias=bias, weight=weight, input=x), F.linear(x, weight, bias))
        assert torch.equal(linear.matmul(layers.a, x, other=weight), x @ weight)
        assert torch.equal(linear.addmm(layers.a, bias, mat2=weight, mat1=x), torch.addmm(bias, x, weight))


def test_second_derivatives_of_what_is_not_pruned_are_right_or_refused(layers):
    layers.ratios["a"] = 0.9
    for op, _, tensors, _, _ in CASES.values():
        with pytest.raises(RuntimeError, match="double backward"):
            gradients(lambda *args, op=op: op(layers.a, *args), *tensors, double=True)
    check_exact(layers.a, linear.linear, F.linear, tensor(7, 7), parameter(1, 7), parameter(1))
    check_exact(layers.a, linear.matmul, torch.matmul, tensor(7, 7), parameter(7, 1))
    check_exact(layers.a, linear.addmm, torch.addmm, parameter(5), tensor(7, 7), parameter(7, 5))


def test_an_empty_batch(layers):
    layers.ratios["a"] = 0.9
    check_exact(layers.a, linear.linear, F.linear, tensor(0, 7), parameter(5, 7), parameter(5), double=False)


def test_nan_reaches_the_weight_gradient(layers):
    layers.ratios["a"] = 0.9
    x = tensor(33, 33)
    x.data[3, 4] = torch.nan
    found = gradients(lambda *args: linear.linear(layers.a, *args), x, parameter(5, 33))
    assert found["1"][:, 4].isnan().all()
    assert not found["0"].isnan().any()


def test_autocast_keeps_the_low_precision_input(layers):
    layers.ratios["a"] = 0.9
    x, weight, bias = tensor(33, 133), parameter(7, 133), parameter(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear.linear(layers.a, x, weight, bias)
        assert torch.equal(out, F.linear(x, weight, bias))
    assert held(out, weight, bias) == pruned_bytes(x.bfloat16(), 0.9)
    out.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert_same({"b": bias.grad}, {"b": torch.full((7,), 33.0)})
