"""ReLU and the max pool behind it become one operation: the same values and gradients, fewer bytes."""

import pytest
import torch
import torch.nn.functional as F
from graph_cases import capture
from torch import nn

import surgeon_fx
from surgeon_fx.passes.pipeline import run_passes
from surgeon_fx.retained import retained_bytes

IMAGE = torch.randn(2, 3, 17, 18, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A convolution, and what a spelling makes of its output."""

    def __init__(self, spelling, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.spelling = spelling

    def forward(self, x):
        return self.spelling(self.norm(self.conv(x)))


MATCHES = {
    "modules": nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    "in place": nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    "functions": lambda x: F.max_pool2d(F.relu(x), kernel_size=(3, 2), padding=1, ceil_mode=True),
    "methods": lambda x: F.max_pool2d(x.relu(), 2, dilation=2),
    "in place by name": lambda x: F.max_pool2d(x.relu_(), 3, stride=1),
    "one dimension": lambda x: F.max_pool1d(torch.relu(x.flatten(2)), 4),
    "windows that are large": lambda x: F.max_pool2d(F.relu(x), 17),
    "twice": lambda x: F.max_pool2d(F.relu(x), 3) * F.max_pool2d(F.relu(x), 3),
}
OTHERS = {
    "no relu": lambda x: F.max_pool2d(F.gelu(x), 2),
    "relu is used again": lambda x: F.max_pool2d(y := F.relu(x), 2).sum() * y,
    "relu is returned": lambda x: (y := F.relu(x), F.max_pool2d(y, 2))[1] + y.mean(),
    "indices are asked for": lambda x: F.max_pool2d(F.relu(x), 2, return_indices=True)[0],
    "adaptive": lambda x: F.adaptive_max_pool2d(F.relu(x), 2),
    "average": lambda x: F.avg_pool2d(F.relu(x), 2),
    "changed in place, and read": lambda x: F.max_pool2d(x.relu_(), 2).sum() * x,
    "changed in place through a view": lambda x: F.max_pool2d(x[:, :4].relu_(), 2).sum() * x,
}


def step(model):
    """Output and gradients of a step, with those of the input."""
    x = IMAGE.clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return output.detach(), x.grad, *(p.grad for p in model.parameters())


def relus(gm):
    return sum("relu" in str(node.target) for node in gm.graph.nodes)


@pytest.mark.parametrize("name", [*MATCHES, *OTHERS])
@pytest.mark.parametrize("norm", [True, False])
def test_values_and_gradients_stay(name, norm):
    spelling = (MATCHES | OTHERS)[name]
    eager, ours = Network(spelling, norm), surgeon_fx.transform(Network(spelling, norm))
    for layout in (torch.contiguous_format, torch.channels_last):
        expected, found = step(eager.to(memory_format=layout)), step(ours.to(memory_format=layout))
        assert all(map(torch.equal, found, expected))
    surgeon_fx.ratios(ours).fill(0.9)
    assert torch.equal(step(ours)[0], step(eager)[0])


@pytest.mark.parametrize("name", MATCHES)
def test_a_relu_is_taken_in(name):
    gm, _, layers = capture(Network(MATCHES[name]), IMAGE)
    counts = run_passes(gm, layers, surgeon_fx.Config())
    assert "relu" not in counts
    assert not relus(gm)


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "no relu"])
def test_others_are_left_alone(name):
    gm, _, layers = capture(Network(OTHERS[name]), IMAGE)
    run_passes(gm, layers, surgeon_fx.Config())
    assert relus(gm)


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_no_bits_are_kept(ratio):
    apart = lambda x: F.max_pool2d(torch.clamp(x, min=0), 2)  # noqa: E731 - the same, which the pass does not know
    held = []
    for spelling in (MATCHES["in place"], apart):
        model = surgeon_fx.transform(Network(spelling))
        surgeon_fx.ratios(model).fill(ratio)
        held.append(retained_bytes(model(IMAGE), model))
        assert surgeon_fx.plan(model, IMAGE).saved_bytes == held[-1]
    assert held[1] - held[0] == 2 * 8 * 17 * 18 // 8


def test_a_pool_of_what_requires_no_gradient():
    model = surgeon_fx.transform(Network(MATCHES["in place"]).requires_grad_(False))
    assert torch.equal(model(IMAGE), F.max_pool2d(F.relu(model.norm(model.conv(IMAGE))), 2))
