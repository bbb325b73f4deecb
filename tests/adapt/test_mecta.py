"""MECTA: its norm against formulas and autograd, its step against a loop written out."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from adapt_cases import Small
from torch import nn

from surgeon_fx import adapt
from surgeon_fx.adapt.norms import MectaNorm
from surgeon_fx.retained import retained_bytes


def make_norm(channels=6, ratio=0.5, threshold=0.0, seed=0):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(channels).double()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    mecta = MectaNorm(norm, ratio, threshold, torch.Generator().manual_seed(seed))
    mecta.moving = True
    return norm, mecta


def gate(mean, var, old_mean, old_var):
    """How far the statistics move, from the formula."""
    distances = []
    for m1, v1, m2, v2 in zip(mean, var, old_mean, old_var, strict=True):
        d = (m1 - m2) ** 2
        distances.append(((v1 + 1e-3 + d) / (v2 + 1e-3) + (v2 + 1e-3 + d) / (v1 + 1e-3)) / 2 - 1)
    return 1 - math.exp(-sum(distances) / len(distances))


def written_out_norm(norm, old_mean, old_var, x, kept):
    """Output and new statistics; the gradient on kept channels by autograd, elsewhere as published."""
    mean, var = x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), unbiased=False)
    beta = gate(mean, var, old_mean, old_var)
    new_mean, new_var = (1 - beta) * old_mean + beta * mean, (1 - beta) * old_var + beta * var
    scale = norm.weight * ((var + norm.eps) / (new_var + norm.eps)).sqrt()
    shift = norm.weight * (mean - new_mean) / (new_var + norm.eps).sqrt() + norm.bias
    whole = F.batch_norm(x, None, None, scale, shift, training=True, eps=norm.eps)
    slope = (norm.weight / (new_var + norm.eps).sqrt()).detach()[:, None, None]
    straight = slope * (x - x.mean((0, 2, 3), keepdim=True)) + norm.bias[:, None, None]
    straight = straight + (whole - straight).detach()  # the same value, another gradient
    chosen = torch.zeros(x.shape[1], dtype=torch.bool)
    chosen[kept] = True
    return torch.where(chosen[:, None, None], whole, straight), new_mean, new_var, beta


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.7])
def test_norm_is_the_formula(ratio):
    norm, mecta = make_norm(ratio=ratio)
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64).add(0.5).requires_grad_()
    own = x.detach().clone().requires_grad_()
    kept = torch.randperm(6, generator=torch.Generator().manual_seed(0))[int(ratio * 6) :]
    expected, mean, var, beta = written_out_norm(norm, norm.running_mean, norm.running_var, x, kept)
    assert 0.01 < beta < 0.99
    direct = (x - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
    assert torch.allclose(expected, norm.weight[:, None, None] * direct + norm.bias[:, None, None])
    grad = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, [x, norm.weight, norm.bias], grad)
    found = mecta(own)
    assert torch.allclose(found, expected)
    assert torch.allclose(mecta.mean, mean)
    assert torch.allclose(mecta.var, var)
    assert mecta.cache_bytes == len(kept) * 4 * 5 * 3 * 8
    for a, b in zip(torch.autograd.grad(found, [own, norm.weight, norm.bias], grad), wanted, strict=True):
        assert torch.allclose(a, b)


def test_a_frozen_norm_keeps_nothing_and_scales_the_gradient():
    norm, mecta = make_norm(threshold=1.0)
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64, requires_grad=True)
    out = mecta(x)
    assert mecta.frozen
    assert mecta.cache_bytes == 0
    out.sum().backward()
    slope = norm.weight / (mecta.var + norm.eps).sqrt()
    assert torch.allclose(x.grad, slope.detach()[:, None, None].expand_as(x))
    assert norm.weight.grad is None
    assert norm.bias.grad is None


def test_a_norm_holds_the_channels_it_keeps():
    sizes = {}
    for ratio in (0.0, 0.5):
        _, mecta = make_norm(channels=8, ratio=ratio)
        sizes[ratio] = retained_bytes(mecta(torch.randn(4, 8, 32, 32, dtype=torch.float64, requires_grad=True)), mecta)
    whole = 4 * 8 * 32 * 32 * 8
    assert whole <= sizes[0.0] < whole + 1000
    assert whole / 2 <= sizes[0.5] < whole / 2 + 1000


class Plain(nn.Module):
    """MECTA's norm as a module of `written_out_norm`."""

    def __init__(self, norm, ratio, generator):
        super().__init__()
        self.weight, self.bias, self.eps, self.ratio = norm.weight, norm.bias, norm.eps, ratio
        self.mean, self.var, self.generator = norm.running_mean.clone(), norm.running_var.clone(), generator

    def forward(self, x):
        kept = torch.randperm(x.shape[1], generator=self.generator)[int(self.ratio * x.shape[1]) :]
        out, self.mean, self.var, _ = written_out_norm(self, self.mean, self.var, x, kept)
        return out


@pytest.mark.parametrize("loss", ["entropy", "eata"])
def test_three_steps_of_mecta(loss):
    torch.manual_seed(4)
    model = Small().double()
    reference, before = copy.deepcopy(model).eval(), copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    reference.norm = Plain(reference.norm, 0.5, generator)
    reference.blocks[0].norm = Plain(reference.blocks[0].norm, 0.5, generator)
    own = [p for name, p in reference.named_parameters() if "norm" in name]
    optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    stream = list(torch.rand(3, 16, 3, 1, 1, generator=draws).double() * torch.rand(3, 16, 3, 12, 12, generator=draws))
    mean, taught = None, []
    for x in stream:
        probabilities = F.softmax(reference(x), 1)
        entropy = -(probabilities * probabilities.log()).sum(1)
        if loss == "eata":
            margin = 0.4 * math.log(3)
            keep = (entropy < margin).detach()
            if mean is not None:
                keep &= F.cosine_similarity(mean[None], probabilities.detach(), dim=1) < 0.4
            taught.append(int(keep.sum()))
            if not keep.any():
                continue
            now = probabilities[keep].detach().mean(0)
            mean = now if mean is None else 0.9 * mean + 0.1 * now
            entropy = entropy[keep] * (margin - entropy[keep].detach()).exp()
        optimizer.zero_grad()
        entropy.mean().backward()
        optimizer.step()
    adapter = adapt.MECTA(model, ratio=0.5, threshold=0.0, loss=loss, lr=0.05, seed=2)
    chosen = []
    for x in stream:
        adapter(x)
        chosen.append(adapter.last.selected)
    if loss == "eata":
        assert chosen == taught
        assert sum(count > 0 for count in taught) > 1
    for name, parameter in reference.named_parameters():
        assert torch.allclose(dict(model.named_parameters())[name], parameter, atol=1e-8), name
    for norm, expected in zip(adapter.norms.values(), (reference.norm, reference.blocks[0].norm), strict=True):
        assert torch.allclose(norm.mean, expected.mean)
        assert torch.allclose(norm.var, expected.var)
    assert not torch.equal(model.norm.weight, before["norm.weight"])
    assert torch.equal(model.norm.running_mean, before["norm.running_mean"])
    assert type(model.norm) is nn.BatchNorm2d  # the model's own layers are back
    adapter.reset()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(norm.mean, before["norm.running_mean"]) for norm in list(adapter.norms.values())[:1])


def test_nothing_is_learnt_where_every_layer_is_frozen(model, x):
    before = copy.deepcopy(model.state_dict())
    adapter = adapt.MECTA(model, threshold=1.0)
    first = adapter(x)
    assert adapter.last.skipped == "every norm layer is frozen"
    assert adapter.cache_bytes == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not torch.equal(adapter(x), first)  # the statistics move all the same


def test_what_it_is_not_for(model):
    with pytest.raises(ValueError, match="before transform"):
        adapt.MECTA(adapt.Surgeon(model).model)
    with pytest.raises(ValueError, match="needs batch norm"):
        adapt.MECTA(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    with pytest.raises(ValueError, match="prior"):
        adapt.MECTA(model, prior=2)
    with pytest.raises(ValueError, match="ratio"):
        adapt.MECTA(model, ratio=2.0)


def test_a_batch_that_is_not_finite_leaves_the_statistics(model, x):
    adapter = adapt.MECTA(model)
    adapter(x)
    before = [x.clone() for norm in adapter.norms.values() for x in (norm.mean, norm.var)]
    bad = x.clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.warns(UserWarning, match="left as it is"):
        adapter(bad)
    after = [x for norm in adapter.norms.values() for x in (norm.mean, norm.var)]
    assert all(map(torch.equal, after, before))
    assert adapter(x).isfinite().all()
