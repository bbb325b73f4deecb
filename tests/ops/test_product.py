"""Products, quotients and norms of activations: native at ratio 0; pruned, what their gradients read is pruned."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import check_exact, gradients, held, output_gradient, parameter, pruned_by_hand, pruned_bytes, tensor

from surgeon_fx.ops import product

PAIRS = {
    "alike": (tensor(7, 33, 7), tensor(7, 33, 7, seed=3)),
    "broadcast a little": (tensor(7, 33, 7), tensor(33, 7, seed=3)),
    "gate": (tensor(7, 33, 33), tensor(7, 1, 1, seed=3)),
    "parameter": (tensor(7, 33, 7), parameter(7)),
    "constant": (tensor(7, 33, 7), tensor(7, 33, 7, seed=3, trains=False)),
    "double": (tensor(7, 33, 7, dtype=torch.float64), tensor(7, 33, 7, seed=3, dtype=torch.float64)),
    "half": (tensor(17, 33, 7, dtype=torch.bfloat16), tensor(17, 33, 7, seed=3, dtype=torch.bfloat16)),
    "mixed": (tensor(7, 33, 7), tensor(7, 33, 7, seed=3, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_exact_at_ratio_zero(layers, name):
    a, b = PAIRS[name]
    for x, y in ((a, b), (b, a)):
        check_exact(layers.a, product.mul, torch.mul, x, y)
        check_exact(layers.a, product.mul, torch.mul, x, other=y)
        if name not in ("mixed", "gate"):
            check_exact(layers.a, product.addcmul, torch.addcmul, tensor(33, 7, dtype=a.dtype), x, y, value=0.5)
    check_exact(layers.a, product.div, torch.div, a, b)


def reduced(x, like):
    return x.sum_to_size(like.shape)


@pytest.mark.parametrize("name", ["alike", "broadcast a little", "double", "half"])
def test_pruned_product(layers, name):
    layers.ratios["a"] = 0.7
    a, b = PAIRS[name]
    actual = gradients(lambda *x: product.mul(layers.a, *x), a, b)
    assert torch.equal(actual["output"], a * b)
    g = output_gradient(actual["output"].shape, a.dtype)
    kept_a, kept_b = (pruned_by_hand(x, 0.7) if x.nbytes > 4096 else x.detach() for x in (a, b))
    torch.testing.assert_close(actual["0"], reduced(g * kept_b, a))
    torch.testing.assert_close(actual["1"], reduced(g * kept_a, b))


def test_gates_and_parameters_are_exact(layers):
    """The smaller operand scales everything: only the larger is pruned, for the smaller's gradient."""
    layers.ratios["a"] = 0.7
    for name in ("gate", "parameter"):
        a, b = PAIRS[name]
        actual, expected = gradients(lambda *x: product.mul(layers.a, *x), a, b), gradients(torch.mul, a, b)
        assert torch.equal(actual["output"], expected["output"])
        assert torch.equal(actual["0"], expected["0"])
        g = output_gradient(a.shape)
        torch.testing.assert_close(actual["1"], reduced(g * pruned_by_hand(a, 0.7), b))
        exact = b.nbytes if name == "gate" else 0
        assert held(product.mul(layers.a, a, b), *([b] if name == "parameter" else [])) == pruned_bytes(a, 0.7) + exact


def test_a_constant_operand(layers):
    """What needs no gradient needs nobody kept for it."""
    layers.ratios["a"] = 0.7
    a, b = PAIRS["constant"]
    assert held(product.mul(layers.a, a, b)) == pruned_bytes(b, 0.7)


def test_a_square_written_as_a_product(layers):
    x = tensor(7, 33, 7)
    check_exact(layers.a, lambda key, x: product.mul(key, x, x), lambda x: x * x, x)
    layers.ratios["a"] = 0.7
    found = gradients(lambda x: product.mul(layers.a, x, x), x)
    torch.testing.assert_close(found["0"], 2 * output_gradient(x.shape) * pruned_by_hand(x, 0.7))
    assert held(product.mul(layers.a, x, x)) == pruned_bytes(x, 0.7)  # once


def test_addcmul(layers):
    layers.ratios["a"] = 0.7
    base, a, b = tensor(7, 33, 7, seed=9), *PAIRS["alike"]
    actual = gradients(lambda *x: product.addcmul(layers.a, *x, value=0.5), base, a, b)
    assert torch.equal(actual["output"], torch.addcmul(base, a, b, value=0.5))
    g = output_gradient(base.shape)
    assert torch.equal(actual["0"], g)
    torch.testing.assert_close(actual["1"], 0.5 * g * pruned_by_hand(b, 0.7))
    torch.testing.assert_close(actual["2"], 0.5 * g * pruned_by_hand(a, 0.7))


def test_numbers_are_native(layers):
    layers.ratios["a"] = 0.7
    check_exact(layers.a, product.mul, torch.mul, tensor(7, 33, 7), 0.25)
    check_exact(layers.a, product.div, torch.div, tensor(7, 33, 7), 4)
    assert torch.equal(product.div(layers.a, 3, torch.ones(2)), torch.full((2,), 3.0))
    assert product.mul(layers.a, torch.ones(2), 2).grad_fn is None


def test_quotient(layers):
    a, b = tensor(7, 33, 7), tensor(33, 7, seed=3).detach().abs().add(1).requires_grad_()
    check_exact(layers.a, product.div, torch.div, a, b)
    check_exact(layers.a, product.div, torch.div, a, b, rounding_mode="floor", double=False)
    layers.ratios["a"] = 0.7
    actual, expected = gradients(lambda *x: product.div(layers.a, *x), a, b), gradients(torch.div, a, b)
    assert torch.equal(actual["output"], expected["output"])
    assert torch.equal(actual["0"], expected["0"])
    g = output_gradient(a.shape)
    torch.testing.assert_close(actual["1"], reduced(-g * pruned_by_hand(a, 0.7) / b.detach() ** 2, b))


NORMS = {
    "all": {},
    "last": {"dim": -1},
    "kept": {"dim": 1, "keepdim": True},
    "two": {"dim": (0, 2)},
    "two kept": {"dim": [1, -1], "keepdim": True},
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(layers, name):
    options, x = NORMS[name], tensor(7, 33, 7)
    for op, native in ((product.norm, torch.norm), (product.vector_norm, torch.linalg.vector_norm)):
        layers.ratios["a"] = 0
        check_exact(layers.a, op, native, x, **options)
        layers.ratios["a"] = 0.7
        actual, expected = gradients(lambda x, op=op: op(layers.a, x, **options), x), gradients(native, x, **options)
        assert torch.equal(actual["output"], expected["output"])
        kept = pruned_by_hand(x, 0.7)
        torch.testing.assert_close(actual["0"], torch.where(kept != 0, expected["0"], 0))


def test_norms_of_other_orders_are_native(layers):
    layers.ratios["a"] = 0.7
    for order in (1, 3, float("inf")):
        check_exact(layers.a, product.norm, torch.norm, tensor(7, 33, 7), order, -1, double=order == 3)
    check_exact(layers.a, product.vector_norm, torch.linalg.vector_norm, tensor(7, 33, 7), dtype=torch.float64)


def test_the_norm_of_zeros_has_no_gradient(layers):
    layers.ratios["a"] = 0.7
    x = tensor(33, 33)
    x.data[5] = 0
    found = gradients(lambda x: product.norm(layers.a, x, dim=1), x)["0"]
    assert found.isfinite().all()
    assert not found[5].any()


def test_normalize(layers):
    x = tensor(7, 33, 7)
    for options in ({}, {"dim": -1}, {"p": 1.0, "dim": 2}, {"dim": (1, 2)}):
        layers.ratios["a"] = 0
        check_exact(layers.a, product.normalize, F.normalize, x, **options)
        layers.ratios["a"] = 0.7
        assert torch.equal(product.normalize(layers.a, x, **options), F.normalize(x, **options))
    out = torch.empty(7, 33, 7)
    product.normalize(layers.a, x.detach(), out=out)
    assert torch.equal(out, F.normalize(x))
