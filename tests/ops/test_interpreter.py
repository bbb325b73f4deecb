"""The registry read call by call: every spelling of a function, and the layer each call belongs to."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from op_cases import gradients, held, parameter, pruned_bytes, tensor
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx.ops.interpreter import Interpreter, current_interpreter, parameter_behind, paused
from surgeon_fx.ops.registry import RULES, rule_for

X, Y, WEIGHT = tensor(3, 33, 33), tensor(3, 33, 33, seed=3), parameter(33, 33)

# Spellings, and how many activations each prunes. `w` is a parameter.
SPELLINGS = {
    "F.linear": (lambda x, y, w: F.linear(x, w), 1),
    "F.linear named": (lambda x, y, w: F.linear(weight=w, input=x), 1),
    "@": (lambda x, y, w: x @ w, 1),
    "operator.matmul": (lambda x, y, w: operator.matmul(x, w), 1),
    "torch.matmul named": (lambda x, y, w: torch.matmul(x, other=w), 1),
    "x.matmul": (lambda x, y, w: x.matmul(w.t()), 1),
    "x.mm": (lambda x, y, w: x[0].mm(w), 0.34),
    "einsum": (lambda x, y, w: torch.einsum("bij,jk->bik", x, w), 1),
    "einsum of a list": (lambda x, y, w: torch.einsum("bij,jk->bik", [x, w]), 1),
    "torch.layer_norm": (lambda x, y, w: torch.layer_norm(x, [33], w[0]), 1),
    "F.layer_norm named": (lambda x, y, w: F.layer_norm(x, normalized_shape=[33], bias=w[0], weight=w[1]), 1),
    "F.gelu": (lambda x, y, w: F.gelu(x, approximate="tanh"), 1),
    "torch.sigmoid": (lambda x, y, w: torch.sigmoid(x), 1),
    "x.sigmoid": (lambda x, y, w: x.sigmoid(), 1),
    "F.sigmoid": (lambda x, y, w: F.sigmoid(x), 1),
    "x.tanh": (lambda x, y, w: x.tanh(), 1),
    "x ** 2": (lambda x, y, w: x**2, 1),
    "torch.pow named": (lambda x, y, w: torch.pow(x, exponent=3.0), 1),
    "x.pow": (lambda x, y, w: x.pow(3), 1),
    "x.square": (lambda x, y, w: x.square(), 1),
    "x * y": (lambda x, y, w: x * y, 2),
    "x * x": (lambda x, y, w: x * x, 1),
    "torch.mul named": (lambda x, y, w: torch.mul(x, other=y), 2),
    "torch.multiply": (lambda x, y, w: torch.multiply(x, y), 2),
    "x.multiply": (lambda x, y, w: x.multiply(y), 2),
    "x.mul": (lambda x, y, w: x.mul(y), 2),
    "addcmul": (lambda x, y, w: torch.addcmul(x, x, y, value=2.0), 2),
    "x.norm": (lambda x, y, w: x.norm(dim=-1), 1),
    "F.normalize": (lambda x, y, w: F.normalize(x, dim=-1), 1),
    "F.prelu": (lambda x, y, w: F.prelu(x, w[0, :1]), 1),
}
BITS = {
    "F.relu": lambda x: F.relu(x),
    "x.relu": lambda x: x.relu(),
    "torch.relu": lambda x: torch.relu(input=x),
    "x.relu_": lambda x: x.clone().relu_(),
    "F.relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "torch.threshold": lambda x: torch.threshold(x, 0.1, value=0.0),
    "F.relu6": lambda x: F.relu6(x),
    "x.clamp": lambda x: x.clamp(min=0),
    "torch.clamp": lambda x: torch.clamp(x, -1, max=1),
    "x.clip": lambda x: x.clip(0, 1),
    "torch.clip": lambda x: torch.clip(x, max=0.5),
    "x.clamp_min": lambda x: x.clamp_min(0.1),
    "F.hardtanh": lambda x: F.hardtanh(x, max_val=0.5),
    "F.dropout": lambda x: F.dropout(x, p=0.5),
    "torch.dropout": lambda x: torch.dropout(x, p=0.5, train=True),
}


def interpreter(layers, owner=None):
    return Interpreter(layers.none, owner or (lambda weight: layers.a))


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(layers, name):
    function, count = SPELLINGS[name]
    expected = gradients(lambda x, y: function(x, y, WEIGHT).sum() + 0 * y.sum(), X, Y)
    for ratio in (0.0, 0.9):
        layers.ratios["a"] = ratio
        with interpreter(layers):
            interpreted = current_interpreter()
            interpreted.layer = layers.a  # for those without a weight
            out = function(X, Y, WEIGHT)
            actual = gradients(lambda x, y: function(x, y, WEIGHT).sum() + 0 * y.sum(), X, Y)
        assert torch.equal(actual["output"], expected["output"])
        if ratio == 0:
            assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert held(out, WEIGHT) <= count * pruned_bytes(X, 0.9) + 2 * 4 * 99 + 16  # and lengths of rows


@pytest.mark.parametrize("name", BITS)
def test_spellings_that_keep_bits(layers, name):
    with interpreter(layers):
        out = BITS[name](X)
    assert held(out) == (X.numel() + 7) // 8
    torch.manual_seed(0)
    expected = BITS[name](X)
    torch.manual_seed(0)
    with interpreter(layers):
        assert torch.equal(BITS[name](X), expected)


OUT = {
    "mul": lambda out: torch.mul(X.detach(), Y.detach(), out=out),
    "div": lambda out: torch.div(X.detach(), Y.detach(), out=out),
    "matmul": lambda out: torch.matmul(X.detach(), Y.detach(), out=out),
    "bmm": lambda out: torch.bmm(X.detach(), Y.detach(), out=out),
    "clamp": lambda out: torch.clamp(X.detach(), 0, 1, out=out),
    "clamp_min": lambda out: torch.clamp_min(X.detach(), 0, out=out),
    "sigmoid": lambda out: torch.sigmoid(X.detach(), out=out),
    "square": lambda out: torch.square(X.detach(), out=out),
    "pow": lambda out: torch.pow(X.detach(), 2, out=out),
    "addcmul": lambda out: torch.addcmul(X.detach(), X.detach(), Y.detach(), out=out),
    "normalize": lambda out: F.normalize(X.detach(), out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_a_given_output_is_written(layers, name):
    expected, out = torch.empty(3, 33, 33), torch.empty(3, 33, 33)
    OUT[name](expected)
    with interpreter(layers):
        OUT[name](out)
    assert torch.equal(out, expected)


def test_the_owner_of_a_weight_tells_the_layer(layers):
    layers.ratios["b"] = 0.9
    own, other = parameter(5, 33), parameter(5, 33)
    owner = {id(own): layers.a, id(other): layers.b}
    with interpreter(layers, lambda weight: owner[id(weight)]):
        exact, pruned = F.linear(X, own), F.linear(Y, other * 2)  # a computed weight is its parameter's
    assert held(exact, own) == X.nbytes
    assert held(pruned) < X.nbytes
    with interpreter(layers, lambda weight: None):  # filtered out
        assert held(F.linear(X, own), own) == X.nbytes


def test_a_function_without_weights_follows_the_layer_before_it(layers):
    layers.ratios["b"] = 0.9
    first, second = parameter(33, 33), parameter(33, 33)
    owner = {id(first): layers.a, id(second): layers.b}
    with interpreter(layers, lambda weight: owner[id(weight)]):
        after_exact = F.gelu(F.linear(X, first) + 1)
        after_pruned = F.gelu(F.linear(Y, second).view(-1, 33))
        of_nobody = F.gelu(X)
    assert held(after_exact, first) == 2 * X.nbytes
    assert held(after_pruned, second) == 2 * pruned_bytes(Y, 0.9)
    assert held(of_nobody) == X.nbytes


def test_parameter_behind():
    assert parameter_behind(WEIGHT) is WEIGHT
    assert parameter_behind(WEIGHT.t()) is WEIGHT
    assert parameter_behind(WEIGHT / WEIGHT.norm()) is WEIGHT
    assert parameter_behind(X) is None
    assert parameter_behind(WEIGHT * X[0]) is None


def test_it_can_be_paused(layers):
    with interpreter(layers) as mode:
        assert current_interpreter() is mode
        with paused():
            assert current_interpreter() is None
            assert "Rectify" not in F.relu(X).grad_fn.name()
        assert "Rectify" in F.relu(X).grad_fn.name()
    assert current_interpreter() is None


def test_rules_are_told_by_function_or_method():
    assert rule_for("relu") is RULES[Tensor.relu]
    assert rule_for(F.conv2d).family == "conv"
    assert rule_for("no such method") is None
    assert rule_for(functools.partial(F.relu)) is None
    assert rule_for([]) is None


class Checkpointed(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.a, self.b, self.inside = nn.Linear(33, 33), nn.Linear(33, 33), inside

    def body(self, x):
        return F.gelu(self.a(x)) + F.gelu(self.b(x))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.inside else self.body(x)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_checkpointing_without_a_graph(inside, ratio):
    """Inside and around an interpreted model: the second run is as the first, and nothing is held in between."""
    model = Checkpointed(inside)
    expected = gradients(model, X)
    transformed = surgeon_fx.transform(copy.deepcopy(model), surgeon_fx.Config(capture=False))
    surgeon_fx.ratios(transformed).update({"a": ratio})

    def run(x):
        return transformed(x) if inside else checkpoint(transformed, x, use_reentrant=False)

    assert held(run(X), *transformed.parameters(), X) == 0
    actual = gradients(run, X)
    assert torch.equal(actual["output"], expected["output"])
    assert torch.equal(actual["0"], expected["0"])


def test_hooks_of_any_kind(layers):
    """A callable object has no name to look at."""

    class Same:
        def __call__(self, x):
            return x

    with saved_tensors_hooks(Same(), functools.partial(lambda x: x)), interpreter(layers):
        out = F.relu(X)
    (g,) = torch.autograd.grad(out.sum(), X)
    assert torch.equal(g, (X > 0).float())
