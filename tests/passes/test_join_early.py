"""Join early: same values and gradients, fewer bytes at once, and no part read before it is final."""

import pytest
import torch
import torch.nn.functional as F
from graph_cases import capture
from torch import nn

import surgeon_fx
from surgeon_fx.ops.join import begin_join, join
from surgeon_fx.passes.join_early import LEAST_BYTES, join_early_pass
from surgeon_fx.passes.pipeline import run_passes

SIZE = 80  # two images of 24 channels: over a MiB


class Branches(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b, self.c = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(3, 16, 1)
        self.last = nn.Conv2d(40, 4, 1)

    def forward(self, x):
        return self.function(self, x)


def resize(x):
    return F.interpolate(x, size=(SIZE, SIZE), mode="bilinear")


def from_a_coarse_map(self, x):
    small = x[:, :, ::2, ::2]
    return self.last(torch.cat([resize(self.a(small)), resize(self.b(small)), self.c(x)], 1))


def given_backwards(self, x):
    a, b, c = self.a(x), self.b(x), self.c(x)
    return self.last(torch.cat([c, a, b], 1))


def through_views_and_in_place(self, x):
    c = self.c(x).flatten(2).transpose(1, 2).transpose(1, 2).unflatten(2, (SIZE, SIZE))
    return self.last(torch.cat([F.relu(self.a(x), inplace=True), self.b(x).relu_(), c], 1))


def one_of_them_is_read_elsewhere(self, x):
    a, b, c = self.a(x), self.b(x), self.c(x)
    return self.last(torch.cat([a, b, c], 1)) + b.sum()


def one_of_them_is_the_input(self, x):
    return self.last(torch.cat([self.a(x), self.c(x), x, x[:, :2], x[:, :3]], 1))


def in_two_layouts(self, x):
    a, b, c = self.a(x), self.b(x).contiguous(memory_format=torch.channels_last), self.c(x)
    return self.last(torch.cat([a, F.interpolate(b, scale_factor=1.0), c], 1))


def layouts_the_other_way(self, x):
    b = F.interpolate(self.b(x).contiguous(memory_format=torch.channels_last), scale_factor=1.0)
    return self.last(torch.cat([self.a(x), self.c(x), b], 1))


JOINED = {  # and how many parts are copied before the last one is there
    "coarse": (from_a_coarse_map, 3),
    "backwards": (given_backwards, 3),
    "views": (through_views_and_in_place, 3),
    "elsewhere": (one_of_them_is_read_elsewhere, 2),
    "input": (one_of_them_is_the_input, 2),
    "two layouts": (in_two_layouts, 3),
    "other layouts": (layouts_the_other_way, 3),
    "keyword": (lambda self, x: self.last(torch.cat(dim=-3, tensors=(self.a(x), self.b(x), self.c(x)))), 3),
    "axis": (lambda self, x: self.last(torch.concatenate([self.a(x), self.b(x), self.c(x)], axis=1)), 3),
    "twice": (lambda self, x: self.last(torch.cat([torch.cat([self.a(x), self.b(x)], 1), self.c(x)], 1)), 4),
}


def inputs(channels_last=False):
    torch.manual_seed(0)
    x = torch.randn(2, 3, SIZE, SIZE)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def calls(gm, *functions):
    return [node for node in gm.graph.nodes if node.target in functions]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_joined_early(name, channels_last):
    function, early = JOINED[name]
    gm, _, layers = capture(Branches(function), inputs(channels_last))
    run_passes(gm, layers, surgeon_fx.Config())
    assert not calls(gm, torch.cat, torch.concatenate)
    assert not join_early_pass(gm).modified
    order = list(gm.graph.nodes)
    joins = calls(gm, begin_join, join)
    parts = [next(x for x in node.args[:2][::-1] if isinstance(x, torch.fx.Node)) for node in joins]
    assert sum(order.index(j) == order.index(p) + 1 for j, p in zip(joins, parts, strict=True)) >= early

    model = Branches(function)
    transformed = surgeon_fx.transform(model)
    results = []
    for one in (model, transformed):
        model.zero_grad()
        x = inputs(channels_last).requires_grad_()
        y = one(x)
        (y**2).sum().backward()
        results.append([y, y.stride(), x.grad, *(p.grad for p in model.parameters())])
    assert len(surgeon_fx.explain(transformed, inputs(channels_last)).graphs) == 1
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours, eager) if isinstance(ours, torch.Tensor) else ours == eager


def changed_afterwards(self, x):
    a, b, c = self.a(x), self.b(x), self.c(x)
    views = [a[:], b[:], c[:]]
    a.add_(1)
    return self.last(torch.cat(views, 1))


def changed_through_the_view(self, x):
    a, b, c = self.a(x), self.b(x), self.c(x)
    view = a.view(2, 16, -1)
    b, c = F.relu(b), F.relu(c)
    view.mul_(2)
    return self.last(torch.cat([a, b, c], 1)) + c.mean() + b.mean()


LEFT = {
    "changed afterwards": changed_afterwards,
    "changed through a view": changed_through_the_view,
    "one part": lambda self, x: self.last(torch.cat([self.a(x), x.repeat(1, 8, 1, 1)], 1)),
    "the same twice": lambda self, x: self.last(torch.cat([y := self.a(x), y, self.b(x)], 1)),
    "other types": lambda self, x: self.last(torch.cat([self.a(x), self.b(x), self.c(x).bfloat16()], 1)),
    "small": lambda self, x: torch.cat([self.a(x)[:1, :1, :9], self.b(x)[:1, :1, :9]], 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    gm, _, layers = capture(Branches(LEFT[name]), inputs())
    run_passes(gm, layers, surgeon_fx.Config())
    assert len(calls(gm, torch.cat)) == 1
    assert not calls(gm, begin_join, join)
    model = Branches(LEFT[name])
    assert torch.equal(surgeon_fx.transform(model)(inputs()), model(inputs()))


def test_any_batch_runs_the_same_graph():
    model = surgeon_fx.transform(Branches(from_a_coarse_map))
    plain = surgeon_fx.restore(model)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, SIZE, SIZE)
        assert torch.equal(model(x), plain(x))
    found = surgeon_fx.explain(model, x)
    assert calls(found.graphs[0], begin_join)


def test_gradients_of_gradients():
    model = surgeon_fx.transform(
        Branches(lambda self, x: self.last(torch.cat([self.a(x), self.b(x), self.c(x)], 1)) ** 3)
    )
    found = []
    for one in (model, surgeon_fx.restore(model)):
        x = inputs().requires_grad_()
        (grad,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((grad**2).sum(), x)[0])
    assert torch.equal(*found)


def test_peak_of_forward():
    """Three parts and their whole are there at once natively; joined early, the whole and one part."""
    model = Branches(from_a_coarse_map)
    x = torch.empty(8, 3, SIZE, SIZE, device="meta")
    whole = 8 * 40 * SIZE * SIZE * 4
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.9)

    def peak(planned):
        return max(live for _, live in planned.timeline[: planned.forward_operations])

    assert whole > LEAST_BYTES
    assert peak(surgeon_fx.plan(model, x)) >= 2 * whole
    assert peak(surgeon_fx.plan(transformed, x)) <= 1.65 * whole
