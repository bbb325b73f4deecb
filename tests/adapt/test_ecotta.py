"""EcoTTA: its parts, its warm-up and its step, against plain torch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from adapt_cases import Small, seeing
from torch import nn

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.adapt.ecotta import Shape


class Down(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c_in, c_out, 3, stride, padding=1), nn.BatchNorm2d(c_out)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class Chain(nn.Module):
    """Three blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Down(4, 4, 1), Down(4, 6, 2), Down(6, 6, 1))
        self.head = nn.Linear(6, 3)
        nn.init.normal_(self.head.weight, std=3.0)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Chain().double()


def source(batches=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batches, 8, 3, 12, 12, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(0, 3, (batches, 8), generator=generator), strict=True))


def stream():
    return torch.rand(3, 8, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def forward(model, meta, cuts, x, match=None):
    """The network with its parts written out; `match` collects each part's distance, and cuts the graph."""
    x = model.stem(x)
    for part, (start, end) in zip(meta, cuts, strict=True):
        x = x if match is None else x.detach()
        frozen = x
        for block in model.blocks[start:end]:
            frozen = block(frozen)
        shortcut = F.conv2d(x, part.conv.weight, stride=part.conv.stride, padding=1)
        norms = [
            F.batch_norm(y, None, None, n.weight, n.bias, training=True)
            for y, n in ((frozen, part.norm), (shortcut, part.conv_norm))
        ]
        x = norms[0] + norms[1].relu()
        if match is not None:
            match.append((x - frozen.detach()).abs().mean())
    return model.head(x.mean((2, 3)))


def test_warm_up_and_three_steps(model):
    before = copy.deepcopy(model.state_dict())
    adapter = adapt.EcoTTA(model, parts=2, lr=0.1, seed=3, margin=0.8)
    assert math.isnan(adapter.warm_up(source(), epochs=0))  # builds the parts, and learns nothing
    assert adapter.shapes == [Shape(4, 4, 1), Shape(4, 6, 2)]
    reference, meta, cuts = (
        seeing(copy.deepcopy(model)).requires_grad_(False),
        copy.deepcopy(adapter.meta),
        [(0, 1), (1, 3)],
    )

    optimizer = torch.optim.SGD(meta.parameters(), lr=0.0, momentum=0.9)
    for epoch, rate in enumerate((0.05, 0.05, 0.01, 0.01, 0.002, 0.0004)):
        losses = []
        for i, (x, y) in enumerate(source()):
            optimizer.param_groups[0]["lr"] = rate * ((i + 1) / 2 if epoch == 0 else 1)
            loss = F.cross_entropy(forward(reference, meta, cuts, x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = adapter.warm_up(source(), epochs=6, augment=None)
    assert found == pytest.approx(sum(losses) / 2)
    for name, parameter in meta.named_parameters():
        assert torch.allclose(dict(adapter.meta.named_parameters())[name], parameter), name

    warm = copy.deepcopy(adapter.meta.state_dict())
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.1, momentum=0.9)
    outputs, counts = [], []
    for x in stream():
        match = []
        forward(reference, meta, cuts, x, match)
        optimizer.zero_grad()
        sum(0.25 * loss for loss in match).backward()
        optimizer.step()
        logits = forward(reference, meta, cuts, x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        entropy = entropy[entropy < 0.8 * math.log(3)]
        optimizer.zero_grad()
        if len(entropy):
            entropy.mean().backward()
            optimizer.step()
        outputs.append(logits.detach())
        counts.append(len(entropy))
    assert max(counts) > 0
    assert min(counts) < 8
    for x, expected, count in zip(stream(), outputs, counts, strict=True):
        assert torch.allclose(adapter(x), expected)
        assert adapter.last.selected == count
    for name, parameter in meta.named_parameters():
        assert torch.allclose(dict(adapter.meta.named_parameters())[name], parameter), name
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    adapter.reset()
    assert all(torch.equal(value, warm[key]) for key, value in adapter.meta.state_dict().items())
    assert torch.allclose(adapter(stream()[0]), outputs[0])


def test_no_certain_sample_leaves_the_first_update(model):
    adapter = adapt.EcoTTA(model, parts=1, margin=0.0)
    adapter.warm_up(source(), epochs=1)
    before = copy.deepcopy(adapter.meta.state_dict())
    adapter(stream()[0])
    assert adapter.last.skipped == "no sample was chosen"
    assert not torch.equal(adapter.meta[0].conv.weight, before["0.conv.weight"])


def test_a_warm_state_travels(model):
    adapter = adapt.EcoTTA(model, parts=3)
    adapter.warm_up(source(), epochs=2)
    adapter(stream()[0])
    other = adapt.EcoTTA(copy.deepcopy(model), parts=3)
    other.load_state_dict(copy.deepcopy(adapter.state_dict()))
    for x in stream():
        assert torch.equal(adapter(x), other(x))


def test_one_parts_graph_at_a_time(model):
    """In the first pass a part's graph is gone before the next begins."""
    adapter = adapt.EcoTTA(model, parts=3)
    adapter.warm_up(source(), epochs=1)
    grads = []

    def look(module, args):
        grads.append([p.grad is not None for p in (part.conv.weight for part in adapter.meta)])

    handle = model.head.register_forward_pre_hook(look)
    adapter(stream()[0])
    handle.remove()
    assert grads == [[True] * 3, [False] * 3]  # at the end of the first forward all have been through backward


def test_published_sizes():
    """Parameters beside WRN-28-10 for five and for four parts."""
    for parts, count in ((5, 3_485_440), ((2, 2, 4, 4), 2_562_560)):
        adapter = adapt.EcoTTA(surgeon_fx.zoo.create("wrn28_10"), parts=parts)
        adapter.warm_up([(torch.rand(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))], epochs=0)
        assert sum(p.numel() for p in adapter.trained.values()) == count


def test_what_it_refuses(model):
    x = stream()[0]
    for call in (adapt.EcoTTA(model, parts=2), adapt.EcoTTA(model, parts=2).predict):
        with pytest.raises(ValueError, match=r"labelled source data .* warm_up\(loader\)"):
            call(x)
    adapter = adapt.EcoTTA(model, parts=2)
    for bad in ([x], [], [(x, None)]):
        with pytest.raises(ValueError, match="pairs of images and labels"):
            adapter.warm_up(bad)
    with pytest.raises(ValueError, match="anew for each epoch"):
        adapter.warm_up(iter(source()))
    for options, match in (
        ({"parts": 4}, "into 4 parts, and found 3"),
        ({"parts": (1, 1)}, "the network has 3"),
        ({"loss": "eata"}, "leave out train and loss"),
        ({"optimizer": torch.optim.SGD(model.parameters())}, "must be a function"),
    ):
        with pytest.raises(ValueError, match=match):
            adapt.EcoTTA(model, **options)
    with pytest.raises(ValueError, match="batch norm in every part"):
        adapt.EcoTTA(surgeon_fx.zoo.create("vit_cifar"), parts=2)
    with pytest.raises(ValueError, match="before transform"):
        adapt.EcoTTA(surgeon_fx.transform(Small()))
