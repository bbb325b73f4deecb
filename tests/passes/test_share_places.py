"""The end of a residual block, norm -> sum -> activation -> layers: kept at the norm's places, with one bitmask."""

import operator

import pytest
import torch
import torch.nn.functional as F
from op_cases import pruned_by_hand, pruned_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx.retained import retained_bytes

CHANNELS, RATIO = 12, 0.8
SUMS = {
    "+": operator.add,
    "torch.add": torch.add,
    "method": lambda x, y: x.add(y),
    "in place": lambda x, y: x.add_(y),
    "+=": operator.iadd,
    "scaled": lambda x, y: torch.add(x, y, alpha=0.5),
    "turned": lambda x, y: y + x,
}
ACTIVATIONS = {
    "relu": F.relu,
    "relu_": torch.relu_,
    "none": lambda x: x,
    "leaky": F.leaky_relu,
}


class Block(nn.Module):
    """Two layers read the sum of a norm's output and something else."""

    def __init__(self, add=operator.add, activation=F.relu):
        super().__init__()
        self.norm, self.add, self.activation = nn.BatchNorm2d(CHANNELS), add, activation
        self.first, self.second = (nn.Conv2d(CHANNELS, 10, 3, padding=1, stride=stride) for stride in (1, 2))

    def forward(self, x, y):
        z = self.activation(self.add(self.norm(x), y))
        return self.first(z), self.second(z)


def build(**options):
    torch.manual_seed(0)
    model = Block(**options)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
        model.norm.bias.uniform_(-0.5, 0.5)
    return model, torch.randn(4, CHANNELS, 9, 11), torch.randn(4, CHANNELS, 9, 11)


def shared(model, ratio=RATIO):
    result = surgeon_fx.transform(model, surgeon_fx.Config(share_saves=True))
    surgeon_fx.ratios(result).fill(ratio)
    return result


def step(model, x, y):
    """Outputs, and gradients by name."""
    model.zero_grad()
    outputs = model(x, y)
    seeds = [torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, seeds)
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}, seeds


def held_bytes(model, x, y):
    """As measured, planned and explained."""
    held = retained_bytes(model(x, y), model)
    assert held == surgeon_fx.plan(model, x, y).saved_bytes == surgeon_fx.explain(model, x, y).held_bytes
    return held


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("add", SUMS)
def test_gradients_and_bytes(add, activation, layout):
    model, x, y = build(add=SUMS[add], activation=ACTIVATIONS[activation])
    x, y = x.contiguous(memory_format=layout), y.contiguous(memory_format=layout)
    eager, exact, seeds = step(model, x, y)
    hat = F.batch_norm(x, None, None, training=True)
    keep = pruned_by_hand(hat, RATIO) != 0
    with torch.no_grad():
        z = model.activation(model.add(model.norm(x), y))
    together = shared(model)
    outputs, found, _ = step(together, x, y)
    assert all(map(torch.equal, outputs, eager))
    for layer, seed in zip(("first", "second"), seeds, strict=True):
        own = getattr(model, layer)
        (expected,) = torch.autograd.grad(own(torch.where(keep, z, 0.0)), own.weight, seed)
        torch.testing.assert_close(found[f"{layer}.weight"], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[f"{layer}.bias"], exact[f"{layer}.bias"])
    apart = surgeon_fx.transform(model)
    surgeon_fx.ratios(apart).fill(RATIO)
    mask = (x.numel() + 7) // 8
    assert held_bytes(together, x, y) == held_bytes(apart, x, y) - mask
    assert held_bytes(together, x, y) >= 2 * pruned_bytes(x, RATIO) - mask


@pytest.mark.parametrize(
    ("ratios", "saved_masks"),
    [
        ({"norm": 0.8, "first": 0.8, "second": 0.8}, 1),
        ({"norm": 0.8, "first": 0.9, "second": 0.8}, 1),
        ({"norm": 0.8, "first": 0.8, "second": 0.9}, 1),
        ({"norm": 0.8, "first": 0.5, "second": 0.8}, 0),
        ({"norm": 0.8, "first": 0.8, "second": 0.5}, 0),
        ({"norm": 0.9, "first": 0.8, "second": 0.8}, 0),
        ({"norm": 0.5, "first": 0.8, "second": 0.8}, 0),
        ({"norm": 0.8, "first": 0.0, "second": 0.8}, 0),
        ({"norm": 0.0, "first": 0.8, "second": 0.8}, 0),
        ({"norm": 1.0, "first": 1.0, "second": 1.0}, 0),
    ],
)
def test_one_mask_where_as_many_are_kept(ratios, saved_masks):
    model, x, y = build()
    together, apart = shared(model), surgeon_fx.transform(model)
    for one in (together, apart):
        surgeon_fx.ratios(one).update(ratios)
    saved = saved_masks * (x.numel() + 7) // 8
    held = held_bytes(together, x, y)
    assert held == held_bytes(apart, x, y) - saved
    budget = surgeon_fx.fit(together, x, y, budget=held)
    surgeon_fx.ratios(together).update(budget.ratios)
    assert held_bytes(together, x, y) <= held
    if not saved:
        (_, found, _), (_, expected, _) = step(together, x, y), step(together, x, y)
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_norm_that_serves_a_layer_as_well():
    """One that reads the norm itself is rebuilt, one behind the sum is kept at the same places."""

    class Both(Block):
        def forward(self, x, y):
            z = self.norm(x)
            return self.first(z), self.second(F.relu(z + y))

    torch.manual_seed(0)
    model, x, y = Both(), torch.randn(4, CHANNELS, 9, 11), torch.randn(4, CHANNELS, 9, 11)
    together = shared(model)
    assert held_bytes(together, x, y) <= 2 * pruned_bytes(x, RATIO) + 8 * CHANNELS
    surgeon_fx.ratios(together)["first"] = 0.5  # and then the norm keeps more than the second asks for
    assert held_bytes(together, x, y) >= pruned_bytes(x, 0.5) + pruned_bytes(x, RATIO)


def test_exact_at_ratio_0_and_in_checkpoints():
    model, x, y = build()
    eager, exact, _ = step(model, x, y)
    outputs, found, _ = step(shared(model, 0.0), x, y)
    assert all(map(torch.equal, outputs, eager))
    assert all(torch.equal(found[name], exact[name]) for name in exact)

    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return checkpoint(self.model, x, y, use_reentrant=False)

    apart = surgeon_fx.transform(model)
    surgeon_fx.ratios(apart).fill(RATIO)
    _, expected, _ = step(Checkpointed(apart), x, y)
    _, found, _ = step(Checkpointed(shared(model)), x, y)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_sum_that_is_no_longer_where_the_norm_was():
    """Broadcast, cut, of numbers, or in other strides: kept for itself."""
    for add, shape in (
        (lambda x, y: x + y, (1, CHANNELS, 1, 1)),
        (lambda x, y: x[:1] + y, (4, CHANNELS, 9, 11)),
        (lambda x, y: x + 1, (1,)),
        (lambda x, y: y.sum() + x, (1,)),
    ):
        model, x, _ = build(add=add)
        y = torch.randn(shape)
        together, apart = shared(model), surgeon_fx.transform(model)
        surgeon_fx.ratios(apart).fill(RATIO)
        held_bytes(together, x, y)
        (outputs, found, _), (expected, gradients, _) = step(together, x, y), step(apart, x, y)
        assert all(map(torch.equal, outputs, expected))
        assert torch.equal(found["norm.weight"], gradients["norm.weight"])


@pytest.mark.parametrize("name", ["resnet20_cifar", "vit_cifar"])
def test_without_graphs_the_same_is_shared(name):
    held, gradients = [], []
    for capture in (True, False):
        torch.manual_seed(0)
        model = surgeon_fx.transform(surgeon_fx.zoo.create(name), surgeon_fx.Config(capture=capture, share_saves=True))
        surgeon_fx.ratios(model).fill(RATIO)
        x = torch.randn(4, 3, 32, 32)
        output = model(x)
        held.append(retained_bytes(output, model))
        assert surgeon_fx.plan(model, x).saved_bytes == held[-1]
        output.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert held[0] == held[1]
    assert all(map(torch.equal, *gradients))
