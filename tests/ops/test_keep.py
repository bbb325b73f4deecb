"""What several operations keep of one activation: compressed once, and gone with the graph."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from op_cases import gradients, held, output_gradient, parameter, pruned_by_hand, pruned_bytes, tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from surgeon_fx.ops import attention, conv, keep, linear, norm, product, relu, smooth
from surgeon_fx.retained import nodes, saved_by

X, WEIGHT, OTHER = tensor(33, 33), parameter(5, 33), parameter(7, 33)


def both(layers, x, first="a", second="b"):
    return torch.cat(
        [linear.linear(getattr(layers, first), x, WEIGHT), linear.linear(getattr(layers, second), x, OTHER)], 1
    )


def weight_gradients(out):
    return torch.autograd.grad(out, (WEIGHT, OTHER), output_gradient(out.shape))


def expected_gradients(kept):
    g = output_gradient((33, 12))
    return g[:, :5].T @ kept, g[:, 5:].T @ kept


@pytest.mark.parametrize("ratios", [(0.9, 0.5), (0.5, 0.9), (0.7, 0.7)])
def test_one_activation_is_kept_once_at_the_highest_keep(layers, ratios):
    layers.ratios.update(dict(zip("ab", ratios, strict=True)))
    out = both(layers, X)
    assert held(out, WEIGHT, OTHER) == pruned_bytes(X, min(ratios))
    for actual, expected in zip(weight_gradients(out), expected_gradients(pruned_by_hand(X, min(ratios))), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_exact_user_is_shared_by_those_who_prune(layers, order):
    layers.ratios["b"] = 0.9
    out = both(layers, X, *order)
    assert held(out, WEIGHT, OTHER) == X.nbytes
    for actual, expected in zip(weight_gradients(out), expected_gradients(X.detach()), strict=True):
        torch.testing.assert_close(actual, expected)


def test_views_of_the_same_memory_are_one_activation(layers):
    layers.ratios.fill(0.9)
    x = tensor(33, 7, 33)
    out = linear.linear(layers.a, x, WEIGHT).sum() + linear.linear(layers.b, x.view(-1, 33), OTHER).sum()
    assert held(out, WEIGHT, OTHER) == pruned_bytes(x, 0.9)


def test_a_change_in_place_makes_another_activation(layers):
    layers.ratios.fill(0.9)
    x = X.clone()
    first = linear.linear(layers.a, x, WEIGHT)
    relu.relu_(layers.a, x)
    second = linear.linear(layers.b, x, OTHER)
    (one,) = torch.autograd.grad(first.sum(), WEIGHT)
    (other,) = torch.autograd.grad(second.sum(), OTHER)
    torch.testing.assert_close(one[0], pruned_by_hand(X, 0.9).sum(0))
    torch.testing.assert_close(other[0], pruned_by_hand(X.relu(), 0.9).sum(0))


def test_parts_of_an_activation_are_kept_apart(layers):
    layers.ratios.fill(0.9)
    x = tensor(66, 66)
    out = linear.linear(layers.a, x[:, :33], WEIGHT).sum() + linear.linear(layers.b, x[:, 33:], OTHER).sum()
    assert held(out, WEIGHT, OTHER) == 2 * pruned_bytes(x[:, 33:], 0.9)
    (one, other) = torch.autograd.grad(out, (WEIGHT, OTHER))
    torch.testing.assert_close(one[0], pruned_by_hand(x[:, :33], 0.9).sum(0))
    torch.testing.assert_close(other[0], pruned_by_hand(x[:, 33:], 0.9).sum(0))


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_records_die_with_the_graph(layers, ratio):
    layers.ratios["b"] = ratio
    layers.ratios["a"] = 0.9
    gc.collect()
    before = len(keep._records)
    out = both(layers, X)
    assert len(keep._records) == before + 1
    tensors = [weakref.ref(one) for node in nodes(out) for one in saved_by(node) if one is not None]
    tensors = [one for one in tensors if all(one() is not own for own in (X, WEIGHT, OTHER))]
    assert tensors
    del out
    gc.collect()
    assert len(keep._records) == before
    assert not [one for one in tensors if one() is not None]


def test_the_next_step_does_not_see_the_last(layers):
    """The same batch again, at another ratio: what the first step kept is not used, nor changed, by the second."""
    layers.ratios.fill(0.9)
    first = both(layers, X)
    layers.ratios.fill(0.5)
    second = both(layers, X.clone())
    for actual, expected in zip(weight_gradients(second), expected_gradients(pruned_by_hand(X, 0.5)), strict=True):
        torch.testing.assert_close(actual, expected)
    for actual, expected in zip(weight_gradients(first), expected_gradients(pruned_by_hand(X, 0.9)), strict=True):
        torch.testing.assert_close(actual, expected)


# Operations whose exact form keeps its input or output, and an operation that prunes the same tensor.
EXACT_USERS = {
    "conv": lambda key, x: conv.conv1d(key, x.view(1, 33, 33), parameter(3, 33, 3)).sum(),
    "norm": lambda key, x: norm.layer_norm(key, x, [33], parameter(33)).sum(),
    "gelu": lambda key, x: smooth.gelu(key, x).sum(),
    "product": lambda key, x: product.mul(key, x, tensor(33, 33, seed=3)).sum(),
    "attention written out": lambda key, x: linear.matmul(key, x, x.t()).sum(),
    "attention": lambda key, x: attention.scaled_dot_product_attention(key, *[x.view(1, 1, 33, 33)] * 3).sum(),
}


def held_activations(out):
    return held(out, *[x for node in nodes(out) for x in saved_by(node) if isinstance(x, torch.nn.Parameter)])


@pytest.mark.parametrize("name", EXACT_USERS)
def test_every_exact_operation_is_shared(layers, name):
    layers.ratios["b"] = 0.9
    alone = held_activations(EXACT_USERS[name](layers.a, X))
    exact_first = EXACT_USERS[name](layers.a, X) + linear.linear(layers.b, X, WEIGHT).sum()
    assert held_activations(exact_first) == alone
    del exact_first
    pruned_first = linear.linear(layers.b, X, WEIGHT).sum() + EXACT_USERS[name](layers.a, X)
    assert held_activations(pruned_first) == alone


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "exp"])
def test_an_output_that_is_kept_exactly_is_shared(layers, name):
    layers.ratios["b"] = 0.9
    out = linear.linear(layers.b, getattr(smooth, name)(layers.a, X), WEIGHT)
    assert held(out, WEIGHT) == X.nbytes


def test_an_input_that_is_overwritten_is_not_taken_for_kept(layers):
    """In place, torch keeps a copy of the input: the output may still be pruned."""
    layers.ratios["b"] = 0.9
    out = linear.linear(layers.b, smooth.silu(layers.a, X.clone(), inplace=True), WEIGHT)
    assert held(out, WEIGHT) == X.nbytes + pruned_bytes(X, 0.9)


def test_attention_in_parts_keeps_its_parts(layers):
    """Where torch writes attention out, its output is not kept and may be pruned."""
    layers.ratios["b"] = 0.9
    q = tensor(2, 2, 33, 33)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        native = F.scaled_dot_product_attention(q, q, q)
        out = attention.scaled_dot_product_attention(layers.a, q, q, q)
    assert held(linear.linear(layers.b, out, WEIGHT), WEIGHT) <= held(native) + pruned_bytes(q, 0.9)


def test_hooks_of_others_see_what_is_saved(layers):
    layers.ratios.update({"a": 0.9, "b": 0.5})
    packed, unpacked = [], []

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    def unpack(x):
        unpacked.append(x.shape)
        return x

    with saved_tensors_hooks(pack, unpack):
        out = both(layers, X)
    actual = weight_gradients(out)
    assert sorted(packed) == sorted(unpacked)
    g = output_gradient(out.shape)
    torch.testing.assert_close(actual[0], g[:, :5].T @ pruned_by_hand(X, 0.9))  # not shared: what was packed is theirs
    torch.testing.assert_close(actual[1], g[:, 5:].T @ pruned_by_hand(X, 0.5))


def test_hooks_that_keep_the_tensor_itself(layers):
    layers.ratios.update({"a": 0.9, "b": 0.5})
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        out = both(layers, X)
    for actual, expected in zip(weight_gradients(out), expected_gradients(pruned_by_hand(X, 0.5)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_save_on_cpu(layers):
    layers.ratios.update({"a": 0.9, "b": 0.5})
    plain = gradients(lambda x: both(layers, x), X)
    with torch.autograd.graph.save_on_cpu():
        offloaded = gradients(lambda x: both(layers, x), X)
    assert torch.equal(plain["0"], offloaded["0"])


def region(layers, order):
    return lambda x: both(layers, x, *order)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("ratios", [(0.9, 0.0), (0.9, 0.5), (0.9, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("outside", ["", "exact", "pruned"])
def test_checkpointed_regions_run_again_as_they_ran(layers, order, ratios, outside):
    """Whoever else keeps the region's input, the second run saves what the first did."""
    layers.ratios.update(dict(zip("ab", ratios, strict=True)))
    out = checkpoint(region(layers, order), X, use_reentrant=False)
    assert held(out, WEIGHT, OTHER, X) == 0
    rest = out.sum() * 0
    if outside == "exact":
        rest = F.gelu(X).sum() + smooth.gelu(layers.none, X).sum()
    elif outside == "pruned":
        layers.ratios["b"] = 0.3
        rest = linear.linear(layers.b, X, parameter(3, 33)).sum()
        layers.ratios["b"] = ratios["ab".index("b")]
    loss = (out * output_gradient(out.shape)).sum() + rest
    actual = torch.autograd.grad(loss, (WEIGHT, OTHER), retain_graph=True)
    again = torch.autograd.grad(loss, (WEIGHT, OTHER))
    g = output_gradient(out.shape)
    for name, one, once_more, part in zip(order, actual, again, (g[:, :5], g[:, 5:]), strict=True):
        assert torch.equal(one, once_more)
        torch.testing.assert_close(one, part.T @ pruned_by_hand(X, layers.ratios[name]))


def test_reentrant_checkpointing(layers):
    layers.ratios.update({"a": 0.9, "b": 0.5})
    x = X.detach().clone().requires_grad_()
    out = checkpoint(region(layers, "ab"), x, use_reentrant=True)
    (out * output_gradient(out.shape)).sum().backward()
    for parameter_, expected in zip((WEIGHT, OTHER), expected_gradients(pruned_by_hand(X, 0.5)), strict=True):
        torch.testing.assert_close(parameter_.grad, expected)
        parameter_.grad = None
