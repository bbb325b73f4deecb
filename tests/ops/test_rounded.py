"""Activations that may not be pruned, kept rounded: the native gradients of rounded activations, and nothing else."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from model_cases import Attention
from op_cases import Layers, assert_same, gradients, held, output_gradient, parameter, tensor
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx.kernels import dequantize, quantize, quantized_bytes
from surgeon_fx.kernels.layout import unflatten
from surgeon_fx.ops import attention, exact, linear
from surgeon_fx.ops.rounded import run_unknown

BOTH = pytest.mark.parametrize("rounding", ["int8", "bf16"])
Q, K, V = (tensor(2, 3, 33, 40, seed=seed) for seed in range(3))


def rounded_layers(rounding, **ratios):
    layers = Layers()
    layers.slots.exact_saves = rounding
    layers.ratios.update(ratios)
    return layers


def round_by_hand(x, rounding):
    x = x.detach()
    if rounding == "bf16":
        return x.bfloat16().to(x.dtype)
    return unflatten(dequantize(*quantize(x), x.dtype), x.shape, x.stride())


def rounded_bytes(rounding, *tensors):
    return sum(quantized_bytes(x.numel(), x.dtype) if rounding == "int8" else 2 * x.numel() for x in tensors)


def computed(*leaves):
    """Activations: what comes out of an operation, not leaves."""
    return [x.clone() for x in leaves]


@BOTH
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_attention(rounding, ratio):
    layers = rounded_layers(rounding, a=ratio)
    attend = attention.scaled_dot_product_attention
    actual = gradients(lambda *x: attend(layers.a, *computed(*x)), Q, K, V)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, K, V)
    q, k, v = (round_by_hand(x, rounding) for x in (Q, K, V))
    o, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    g = output_gradient(out.shape)
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, o, log_sum, 0.0, False)
    assert_same(actual, {"output": out.detach(), **dict(zip("012", expected, strict=True))})
    exactly = gradients(F.scaled_dot_product_attention, Q, K, V)
    for name in "012":
        error = (actual[name] - exactly[name]).norm() / exactly[name].norm()
        assert error < 0.03
    output = attend(layers.a, *computed(Q, K, V))
    assert held(output) == rounded_bytes(rounding, Q, K, V, out) + log_sum.nbytes


@BOTH
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.rand(33, 33) > 0.3}, {"scale": 3.0}])
def test_peaked_attention_stays_bounded(rounding, options):
    """Logits of hundreds: rounded ones make another map, which still sums to one."""
    layers = rounded_layers(rounding)
    q, k = (20 * x.detach() for x in (Q, K))
    q.requires_grad_(), k.requires_grad_()
    attend = attention.scaled_dot_product_attention
    actual = gradients(lambda *x: attend(layers.a, *computed(*x), **options), q, k, V)
    rounded = [round_by_hand(x, rounding).detach().requires_grad_() for x in (q, k, V)]
    expected = gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), *rounded)
    for name in "012":
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


@BOTH
def test_no_unrounded_activation_outlives_attention(rounding):
    layers = rounded_layers(rounding)
    given = computed(Q, K, V)
    storages = [StorageWeakRef(x.untyped_storage()) for x in given]
    output = attention.scaled_dot_product_attention(layers.a, *given)
    del given
    assert all(one.expired() for one in storages)
    output.sum().backward()


@BOTH
def test_attention_over_views_of_one_tensor_keeps_each_once(rounding):
    layers = rounded_layers(rounding)
    whole = tensor(2, 33, 3, 4, 40)

    def split(x):
        return (x.clone()).permute(2, 0, 3, 1, 4).unbind(0)

    def ours(x):
        return attention.scaled_dot_product_attention(layers.a, *split(x))

    eager = gradients(lambda x: F.scaled_dot_product_attention(*split(x)), whole)["0"]
    assert (gradients(ours, whole)["0"] - eager).norm() < 0.03 * eager.norm()
    q, *_ = split(whole)
    assert held(ours(whole)) == 4 * rounded_bytes(rounding, q) + 2 * 4 * 33 * 4


@BOTH
def test_mask_that_trains_is_attention_written_out(rounding):
    mask = tensor(33, 33, seed=4)
    layers = rounded_layers(rounding)

    def ours(q, k, v, m):
        return attention.scaled_dot_product_attention(layers.a, *computed(q, k, v), attn_mask=m.clone())

    actual = gradients(ours, Q, K, V, mask)
    expected = gradients(F.scaled_dot_product_attention, Q, K, V, mask)
    assert torch.equal(actual["output"], expected["output"])
    for name in "0123":
        assert (actual[name] - expected[name]).norm() < 0.03 * expected[name].norm()


@BOTH
def test_softmax_and_products(rounding):
    layers = rounded_layers(rounding)
    a, b = tensor(3, 40, 50), tensor(3, 50, 60)
    g = output_gradient((3, 40, 60))
    actual = gradients(lambda a, b: linear.matmul(layers.a, *computed(a, b)), a, b)
    ra, rb = round_by_hand(a, rounding), round_by_hand(b, rounding)
    torch.testing.assert_close(actual["0"], g @ rb.mT)
    torch.testing.assert_close(actual["1"], ra.mT @ g)
    product = linear.matmul(layers.a, *computed(a, b))
    assert held(product) == rounded_bytes(rounding, a, b)
    actual = gradients(lambda x: exact.softmax(layers.a, x.clone(), -1), a)
    y = round_by_hand(a.softmax(-1), rounding)
    g = output_gradient(a.shape)
    torch.testing.assert_close(actual["0"], g * y - y * (g * y).sum(-1, keepdim=True))
    assert torch.equal(actual["output"], a.detach().softmax(-1))


def test_functions_round_as_far_as_they_stand():
    layers = rounded_layers("int8")
    x = (tensor(40, 64).detach().abs() + 1e-6).requires_grad_()

    def ours(name):
        return gradients(lambda x: getattr(exact, name)(layers.a, x.clone()), x)["0"]

    (expected,) = torch.autograd.grad((x.clone()).amax(), x)
    assert torch.equal(ours("amax") != 0, expected != 0)  # compares: exact
    g = output_gradient(x.shape)
    torch.testing.assert_close(ours("log"), g / round_by_hand(x, "bf16"))  # divides: no zero where there was none
    torch.testing.assert_close(ours("sqrt"), g / (2 * round_by_hand(x.sqrt(), "bf16")))
    assert ours("log").isfinite().all()


@BOTH
def test_a_function_that_nobody_knows(rounding):
    layers = rounded_layers(rounding)
    x = tensor(40, 64)
    actual = gradients(lambda x: run_unknown(layers.none, torch.erf, x.clone()), x)
    y = round_by_hand(x, "bf16")
    expected = output_gradient(x.shape) * 2 / torch.pi**0.5 * torch.exp(-y * y)
    torch.testing.assert_close(actual["0"], expected)
    assert torch.equal(actual["output"], torch.erf(x).detach())
    weight = parameter(64, 64)
    output = run_unknown(layers.none, torch.erf, weight)
    assert held(output, weight) == 0  # a parameter passes
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nan_and_infinity_are_not_lost():
    layers = rounded_layers("int8")
    a, b = tensor(40, 64), tensor(64, 50)
    with torch.no_grad():
        a[3, 5], a[7, 9] = torch.nan, torch.inf
    found = gradients(lambda a, b: linear.matmul(layers.a, *computed(a, b)), a, b)["1"]
    assert not found.isfinite().any(1)[5]
    assert not found.isfinite().any(1)[9]


@BOTH
@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize("linear_first", [True, False])
def test_shared_with_a_layer(rounding, ratio, linear_first):
    """The activation is kept once: rounded, or as it is where a layer of ratio 0 keeps it."""
    layers = rounded_layers(rounding, a=ratio)
    leaf, weight = tensor(2, 40, 64), parameter(48, 64)
    x, other = leaf.clone(), leaf.clone()

    def layer():
        return linear.linear(layers.a, x, weight)

    def product():
        return linear.bmm(layers.b, x, other.mT)

    outputs = [layer(), product()] if linear_first else [product(), layer()]
    kept = x.nbytes if ratio == 0 else rounded_bytes(rounding, x)
    assert held(outputs, weight) == kept + rounded_bytes(rounding, other)
    output = outputs[0 if linear_first else 1]
    grad = output_gradient(output.shape)
    (found,) = torch.autograd.grad(output, weight, grad)
    used = x.detach() if ratio == 0 else round_by_hand(x, rounding)
    torch.testing.assert_close(found, grad.view(-1, 48).t() @ used.reshape(-1, 64))


def test_double_backward_is_refused():
    layers = rounded_layers("int8")
    x = tensor(40, 64)
    output = exact.softmax(layers.a, x.clone(), -1)
    with pytest.raises(RuntimeError, match=r"Config\(exact_saves=None\)"):
        torch.autograd.grad(output.square().sum(), x, create_graph=True)


class Unknown(nn.Module):
    """Attention, and functions of the graph that have no rule."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(16, 16)

    def forward(self, x):
        x = torch.erf(self.attention(x))
        return self.head(torch.atan(x.expm1())).maximum(x)


def step(model, x, context=None):
    model.zero_grad()
    torch.manual_seed(0)
    if context is None:
        output = model(x)
    else:
        with context:
            output = model(x)
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


@BOTH
@pytest.mark.parametrize("capture", [True, False])
def test_models(rounding, capture):
    torch.manual_seed(0)
    plain, x = Unknown(), torch.randn(4, 60, 16)
    expected = step(plain, x)
    config = surgeon_fx.Config(exact_saves=rounding, capture=capture)
    model = surgeon_fx.transform(plain, config)
    actual = step(model, x)
    assert torch.equal(actual[0], expected[0])
    assert any(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < 0.03 * b.norm() + 1e-8
    off = surgeon_fx.transform(plain, surgeon_fx.Config(capture=capture))
    assert all(torch.equal(a, b) for a, b in zip(step(off, x), expected, strict=True))


@BOTH
def test_composes_with_other_hooks(rounding):
    torch.manual_seed(0)
    model = surgeon_fx.transform(Unknown(), surgeon_fx.Config(exact_saves=rounding))
    x = torch.randn(4, 60, 16, requires_grad=True)
    for ratio in (0.0, 0.7):
        surgeon_fx.ratios(model).fill(ratio)
        expected = step(model, x)
        moved = step(model, x, torch.autograd.graph.save_on_cpu())
        for a, b in zip(moved, expected, strict=True):
            torch.testing.assert_close(a, b)
        if ratio == 0:  # in a checkpointed region a pruned activation is not shared
            for a, b in zip(step(Checkpointed(model), x), expected, strict=True):
                torch.testing.assert_close(a, b)


class Checkpointed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


def test_copies_and_pickles_round_alike():
    torch.manual_seed(0)
    x = torch.randn(4, 60, 16)
    model = surgeon_fx.transform(Attention(), surgeon_fx.Config(exact_saves="int8"))
    expected = step(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(twin, x), expected, strict=True))


def test_explained():
    torch.manual_seed(0)
    x = torch.randn(4, 60, 16)
    found = surgeon_fx.explain(surgeon_fx.transform(Attention(), surgeon_fx.Config(exact_saves="int8")), x)
    assert {row.reason for row in found.rows} >= {"not pruned; kept as int8"}
    assert not [note for note in found.notes if "exact_saves" in note]
    plain = surgeon_fx.explain(surgeon_fx.transform(Attention()), x)
    assert [note for note in plain.notes if "try Config(exact_saves='int8')" in note]
    assert found.dense_bytes == plain.dense_bytes
    assert found.held_bytes < plain.held_bytes


def test_bad_configuration_is_refused():
    with pytest.raises(ValueError, match="exact_saves must be None, 'int8' or 'bf16', got 'fp8'"):
        surgeon_fx.Config(exact_saves="fp8")
