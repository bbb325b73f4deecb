"""Tag: which rule and which layer every node of a graph belongs to."""

import operator

import pytest
import torch
import torch.nn.functional as F
from graph_cases import Function, capture, savings
from torch import nn

from surgeon_fx.passes.tag_saves import saving_of, tag_saves_pass

X = torch.randn(5, 33)

# A function of h, a linear layer's output, and of x, the input; the rules of what it adds to the layer's own
SPELLINGS = {
    "gelu": (lambda h, x: F.gelu(h), ["smooth"]),
    "gelu by keyword": (lambda h, x: F.gelu(input=h, approximate="tanh"), ["smooth"]),
    "sigmoid": (lambda h, x: torch.sigmoid(h), ["smooth"]),
    "sigmoid method": (lambda h, x: h.sigmoid(), ["smooth"]),
    "relu": (lambda h, x: F.relu(h), ["relu"]),
    "relu in place": (lambda h, x: h.relu_(), ["relu"]),
    "clamp": (lambda h, x: torch.clamp(h, max=1.0), ["relu"]),
    "clamp method": (lambda h, x: h.clamp(min=0), ["relu"]),
    "product": (lambda h, x: h * x, ["product"]),
    "product by keyword": (lambda h, x: torch.mul(h, other=x), ["product"]),
    "product method": (lambda h, x: h.mul(x), ["product"]),
    "product operator": (lambda h, x: operator.mul(x, h), ["product"]),
    "product with itself": (lambda h, x: h * h, ["product"]),
    "by a number": (lambda h, x: h * 2.0, []),
    "number first": (lambda h, x: 0.5 * h, []),
    "number by keyword": (lambda h, x: torch.mul(h, other=0.25), []),
    "divided by a number": (lambda h, x: torch.div(h, 3), []),
    "quotient": (lambda h, x: x / (h.abs() + 1), ["exact", "product"]),
    "power": (lambda h, x: h**2, ["smooth"]),
    "power by keyword": (lambda h, x: torch.pow(h, exponent=3.0), ["smooth"]),
    "matrix product of activations": (lambda h, x: h @ x.t(), ["attention"]),
    "matmul method": (lambda h, x: h.matmul(x.t()), ["attention"]),
    "softmax": (lambda h, x: h.softmax(dim=1), ["exact"]),
    "softmax function": (lambda h, x: F.softmax(h, -1), ["exact"]),
    "log softmax": (lambda h, x: F.log_softmax(h, dim=-1), ["exact"]),
    "root": (lambda h, x: h.abs().sqrt(), ["exact", "exact"]),
    "dropout": (lambda h, x: F.dropout(h, p=0.5), ["dropout"]),
    "pool": (lambda h, x: F.max_pool1d(h, kernel_size=2), ["pool"]),
    "norm": (lambda h, x: F.layer_norm(h, [33]), ["norm"]),
    "normalize": (lambda h, x: F.normalize(h, dim=-1), ["product"]),
    "attention": (lambda h, x: F.scaled_dot_product_attention(h, key=h, value=h), ["attention"]),
    "shapes": (lambda h, x: h.view(-1, 11).transpose(0, 1).sum(0) + 1, []),
    "given output": (lambda h, x: torch.mul(x, x, out=torch.empty(5, 33)) + h, []),
    "no gradient": (lambda h, x: h + x.softmax(-1), []),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    function, rules = SPELLINGS[name]
    gm, _, layers = capture(Function(function), X)
    assert tag_saves_pass(gm, layers).modified
    assert savings(gm) == [("linear", "layer"), *((rule, "layer") for rule in rules)]
    assert not tag_saves_pass(gm, layers).modified
    assert savings(gm) == [("linear", "layer"), *((rule, "layer") for rule in rules)]


def test_a_record_says_why():
    gm, _, layers = capture(Function(lambda h, x: (h @ x.t()).softmax(-1)), X)
    tag_saves_pass(gm, layers)
    records = [saving for node in gm.graph.nodes if (saving := saving_of(node)) is not None]
    assert [saving.reason for saving in records] == [
        "",
        "a product of two activations needs both",
        "softmax keeps its output",
    ]
    assert all(saving.key.endswith(":layer") for saving in records)


def test_nothing_to_tag():
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return x + 1

    gm, _, layers = capture(Nothing(), X.clone().requires_grad_())
    assert not tag_saves_pass(gm, layers).modified


class Owners(nn.Module):
    """Weights that are used by others than their own module."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 33)
        self.tied.weight = self.first.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(33, 33))
        self.scale = nn.Parameter(torch.ones(33))

    def forward(self, x):
        x = self.second(self.first(x))
        x = self.first(x)  # shared
        x = self.tied(x)  # the weight of the first
        x = F.linear(x, self.second.weight.t(), self.first.bias)  # another's weight
        x = x @ self.second.weight
        x = torch.einsum("bi,oi->bo", x, self.first.weight)
        x = self.normed(x)  # a computed weight
        x = F.linear(x, self.second.weight * self.scale)
        return F.gelu(x) * self.scale


def test_the_owner_of_the_weight_tells_the_layer():
    gm, _, layers = capture(Owners(), X)
    tag_saves_pass(gm, layers)
    expected = ["first", "second", "first", "first", "second", "second", "first", "normed", *["second"] * 4]
    assert [layer for _, layer in savings(gm)] == expected


def test_layers_that_are_filtered_out_stay_native():
    model = nn.Sequential(nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 33), nn.ReLU(), nn.LayerNorm(33))
    gm, _, layers = capture(model, X, filter_fn=lambda module, name: name != "2")
    tag_saves_pass(gm, layers)
    assert savings(gm) == [("linear", "0"), ("smooth", "0"), ("relu", "0"), ("norm", "4")]


def test_what_runs_inside_a_layer_is_the_layers():
    """A layer written out: its functions belong to it, whatever they read."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(33))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    gm, _, layers = capture(nn.Sequential(nn.Linear(33, 33), Norm(), nn.GELU()), X)
    tag_saves_pass(gm, layers)
    assert savings(gm) == [
        ("linear", "0"),
        ("smooth", "1"),
        ("exact", "1"),
        ("product", "1"),
        ("product", "1"),
        ("smooth", "1"),
    ]


@pytest.mark.parametrize(
    ("layer", "shape", "rule"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 9), "conv"),
        (nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 9, 9), "conv"),
        (nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5), "conv"),
        (nn.ConvTranspose1d(3, 4, 3), (2, 3, 9), "conv"),
        (nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 9, 9), "conv"),
        (nn.ConvTranspose3d(3, 4, 3), (2, 3, 5, 5, 5), "conv"),
        (nn.Linear(9, 4), (2, 9), "linear"),
        (nn.BatchNorm1d(3), (2, 3, 9), "norm"),
        (nn.BatchNorm2d(3, affine=False), (2, 3, 9, 9), "norm"),
        (nn.InstanceNorm2d(3), (2, 3, 9, 9), "norm"),
        (nn.LayerNorm(9), (2, 9), "norm"),
        (nn.GroupNorm(3, 6), (2, 6, 9), "norm"),
        (nn.RMSNorm(9), (2, 9), "norm"),
        (nn.MultiheadAttention(8, 2), (5, 2, 8), "attention"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_of_torch(layer, shape, rule):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.ModuleDict({"layer": layer})

        def forward(self, x):
            layer = self.block["layer"]
            return layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)

    gm, _, layers = capture(Model(), torch.randn(shape, requires_grad=True))
    tag_saves_pass(gm, layers)
    assert (rule, "block.layer") in savings(gm)
