"""The adaptation methods: what they train, what they leave alone, and what they do with odd input."""

import copy
import functools
import gc
import math

import pytest
import torch
from adapt_cases import LEARNING, OWN_STATISTICS, TEACHERS, Pixels, Small, build
from model_cases import MODELS, Network, watch
from torch import nn

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.adapt.augment import augment
from surgeon_fx.adapt.shift import Shift
from surgeon_fx.losses import certain_entropy, consistency, entropies
from surgeon_fx.retained import retained_bytes


def test_every_method_adapts_and_resets(x):
    for name in adapt.METHODS:
        torch.manual_seed(0)
        model = Small().train()
        model.norm.eval()
        state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
        rng = torch.get_rng_state()
        adapter = build(name, model)
        first = adapter(x)
        assert not first.requires_grad
        assert torch.equal(rng, torch.get_rng_state()), name
        assert [m.training for m in model.modules()] == modes, name
        assert all(p.requires_grad for p in model.parameters()), name
        assert all(p.grad is None for p in model.parameters()), name
        changed = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
        assert changed <= set(adapter.trained), name  # and so no running statistics
        assert bool(changed) == (name in LEARNING and name != "ecotta"), name
        second = adapter(x)
        assert torch.equal(first, second) == (name not in LEARNING)
        adapter.reset()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), name
        assert torch.equal(adapter(x), first), name
        assert torch.equal(adapter(x), second), name
        assert type(adapter).__name__ in repr(adapter)


def test_predictions_are_those_before_the_update(model, x):
    reference = copy.deepcopy(model).eval()
    expected = reference(x)
    assert torch.equal(adapt.Source(copy.deepcopy(model))(x), expected)
    for norm in (reference.norm, reference.blocks[0].norm):
        norm.train()
    expected = reference(x)
    assert torch.equal(adapt.BNStat(copy.deepcopy(model))(x), expected)
    for name in LEARNING:
        if name not in TEACHERS and name not in OWN_STATISTICS:
            assert torch.equal(adapt.METHODS[name](copy.deepcopy(model))(x), expected), name


def test_step_is_that_of_plain_torch(model, x):
    """Full tuning, checkpointing and a Surgeon that prunes nothing: the update of a loop written out."""
    reference = copy.deepcopy(model).eval()
    for norm in (reference.norm, reference.blocks[0].norm):
        norm.train()
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        surgeon_fx.entropy(reference(x)).backward()
        optimizer.step()
    expected = dict(reference.named_parameters())
    for method in (adapt.FullTuning, adapt.Checkpointed, functools.partial(adapt.StaticSparsity, ratio=0.0)):
        own = copy.deepcopy(model)
        adapter = method(own, lr=1e-2)
        for _ in range(3):
            adapter(x)
        for name, parameter in own.named_parameters():
            assert torch.equal(parameter, expected[name]), (method, name)
        assert own.norm.num_batches_tracked == 0
        assert "forward" not in own.blocks[0].__dict__


def test_tent_trains_norms_alone(model, x):
    adapter = adapt.Tent(model)
    assert set(adapter.trained) == {"norm.weight", "norm.bias", "blocks.0.norm.weight", "blocks.0.norm.bias"}
    assert set(adapt.Surgeon(model, norm_only=True).trained) == set(adapter.trained)
    for method in (adapt.Tent, functools.partial(adapt.Surgeon, norm_only=True)):
        with pytest.raises(ValueError, match="norm"):
            method(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="needs batch norm"):
        adapt.BNStat(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert len(adapt.Tent(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))).trained) == 2


def test_frozen_stays_frozen(model, x):
    model.conv.requires_grad_(False)
    before = model.conv.weight.clone()
    for name in ("full", "surgeon", "static", "checkpoint"):
        adapter = adapt.METHODS[name](model)
        assert "conv.weight" not in adapter.trained
        adapter(x)
        assert torch.equal(model.conv.weight, before)
        assert not model.conv.weight.requires_grad
    with pytest.raises(ValueError, match="nothing to train"):
        adapt.FullTuning(model.requires_grad_(False))


@pytest.mark.parametrize("name", LEARNING)
def test_odd_batches(name, x):
    for batch in (x[:1], x[:3]):
        torch.manual_seed(0)
        adapter = build(name, Small())
        adapter(x)
        assert adapter(batch).shape == (len(batch), 3)
        with pytest.raises(ValueError, match="at least one sample"):
            adapter(x[:0])


def test_one_value_a_channel_takes_the_source_statistics():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x = torch.randn(1, 4)
    assert torch.equal(adapt.BNStat(model)(x), model.eval()(x))
    adapt.Surgeon(model)(x)


def test_prior_mixes_statistics(model, x):
    model.norm.running_mean.fill_(0.3)
    model.norm.running_var.fill_(2.0)
    source, batch, mixed = adapt.Source(model)(x), adapt.BNStat(model)(x), adapt.BNStat(model, prior=8)(x)
    assert not torch.equal(mixed, batch)
    assert torch.allclose(adapt.BNStat(model, prior=1e9)(x), source, atol=1e-5)
    assert torch.allclose(adapt.BNStat(model, prior=1e-9)(x), batch, atol=1e-5)
    seen = []
    handle = model.norm.register_forward_hook(lambda m, args, out: seen.append((args[0], m.running_mean.clone())))
    adapt.BNStat(model, prior=8)(x)
    handle.remove()
    assert torch.allclose(seen[0][1], 0.5 * 0.3 + 0.5 * seen[0][0].mean((0, 2, 3)), atol=1e-6)
    assert (model.norm.running_mean == 0.3).all()
    adapter = adapt.Surgeon(model, prior=8)
    before = model.norm.bias.clone()
    adapter(x)
    assert not torch.equal(model.norm.bias, before)
    assert (model.norm.running_var == 2.0).all()
    with pytest.raises(ValueError, match="prior"):
        adapt.BNStat(model, prior=-1)


def test_non_finite_losses_and_gradients_change_nothing(model, x):
    state = copy.deepcopy(model.state_dict())
    for bad in (lambda out: out.sum() * math.nan, lambda out: out.sum() * math.inf):
        adapter = adapt.FullTuning(model, loss_fn=bad)
        with pytest.warns(UserWarning, match="left as it is"):
            adapter(x)
        adapter(x)  # warns once
        assert adapter.last.skipped.startswith("the loss is")
    adapter = adapt.FullTuning(model, loss_fn=lambda out: (out * 0).abs().sqrt().sum())  # 0 * inf behind a root
    with pytest.warns(UserWarning, match="gradient is not finite"):
        adapter(x)
    assert "gradient" in adapter.last.skipped
    adapter = adapt.Surgeon(model)
    with pytest.warns(UserWarning, match="not finite"), pytest.warns(UserWarning, match="the loss is nan"):
        adapter(x * math.nan)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    adapter(x)  # and the next batch is learnt from
    assert not adapter.last.skipped


def test_css_learns_from_certain_samples():
    logits = torch.tensor([[9.0, 0, 0], [0.1, 0, 0], [5.0, 0, 0]], requires_grad=True)
    loss, count = certain_entropy(logits)
    assert count == 2
    margin = 0.4 * math.log(3)
    each = entropies(logits)[[0, 2]]
    assert loss.item() == pytest.approx((each * (margin - each).exp()).mean().item())
    assert certain_entropy(torch.zeros(4, 3)) == (None, 0)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    before = copy.deepcopy(model.state_dict())
    adapter = adapt.Surgeon(model, css=True)
    adapter(torch.randn(4, 3))
    assert adapter.last == adapt.Step(None, "no sample was chosen", True, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_consistency_is_the_gradient_of_both_views(model, x):
    """One graph at a time gives what one loss over two live graphs gives."""

    def view(y, generator):
        return y.flip(3) * 0.9

    reference = copy.deepcopy(model).eval()
    for norm in (reference.norm, reference.blocks[0].norm):
        norm.train()
    out, other = reference(x), reference(view(x, None))
    (surgeon_fx.entropy(out) + 0.01 * 3 * consistency(out, other)).backward()
    grads = {}

    class Keep(torch.optim.SGD):
        def step(self):
            grads.update({n: p.grad.clone() for n, p in adapter.trained.items()})

    adapter = adapt.Surgeon(model, cr=True, augment=view, optimizer=lambda ps: Keep(ps, lr=0.0), every=None)
    surgeon_fx.ratios(adapter.model).fill(0.0)
    adapter.batches = 1  # no importance pass: nothing is pruned
    held = []
    adapter.model.register_forward_hook(lambda m, args, o: held.append(torch.is_grad_enabled()))
    adapter(x)
    assert held == [False, True, True]
    for name, parameter in reference.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, rtol=1e-3, atol=1e-6), name


def test_augmentation(x):
    made = [augment(x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert made[0].shape == x.shape
    assert made[0].min() >= 0
    assert made[0].max() <= 1
    assert augment(x[:, :1], torch.Generator()).shape == (8, 1, 12, 12)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        augment(x - 0.5, torch.Generator())
    with pytest.raises(ValueError, match="for images"):
        augment(x[0], torch.Generator())


def test_segmentation_and_models_without_batch_norm(x):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="no blocks"):
        adapt.Checkpointed(Pixels())
    for name in LEARNING:
        if name == "checkpoint" or name in OWN_STATISTICS:
            continue
        adapter = adapt.METHODS[name](Pixels(), **({"train": "norm"} if name == "sar" else {}))
        assert adapter(x[:2])["out"].shape == (2, 4, 12, 12)
        make, shape = MODELS["attention"]
        if not name.endswith("cr") and name != "cotta":
            assert adapt.METHODS[name](make())(torch.randn(shape)).shape == (3, 16)


def test_surgeon_prunes_by_what_it_finds(x):
    torch.manual_seed(0)
    model = Network()
    adapter = adapt.Surgeon(model, seed=3)
    adapter(torch.rand(4, 3, 24, 24))
    found = adapter.importance
    assert dict(surgeon_fx.ratios(adapter.model)) == found.p
    assert len(set(found.p.values())) > 5
    assert adapter.last.refreshed
    twice = adapt.Surgeon(adapter.model)
    assert twice.model is adapter.model


def test_refresh_when_asked(model, x):
    def refreshed(batches, **options):
        adapter = adapt.Surgeon(copy.deepcopy(model), **options)
        return [adapter(batch) is not None and adapter.last.refreshed for batch in batches]

    noisy = (x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    stream = [x, x, x, noisy, noisy, x]
    assert refreshed(stream) == [True] * 6
    assert refreshed(stream, every=3) == [True, False, False, True, False, False]
    assert refreshed(stream, every=None) == [True] + [False] * 5
    assert refreshed(stream, every=None, on_shift=True) == [True, False, False, True, False, True]
    with pytest.raises(ValueError, match="every"):
        adapt.Surgeon(model, every=0)
    with pytest.raises(ValueError, match="threshold"):
        adapt.Surgeon(model, on_shift=-1.0)


def test_shift_on_other_inputs():
    shift = Shift()
    assert shift(torch.randn(64, 10, generator=torch.Generator().manual_seed(0)))
    assert not shift(torch.randn(64, 10, generator=torch.Generator().manual_seed(1)))
    assert shift(3 + torch.randn(64, 10))
    assert shift(torch.randn(4, 5, 6))  # of other channels
    with pytest.raises(ValueError, match="floating-point"):
        shift(torch.arange(10))


@pytest.mark.parametrize("name", ["surgeon", "surgeon_norm", "surgeon_css_cr"])
def test_no_graph_survives_a_step(name, model, x):
    adapter = adapt.METHODS[name](model)
    seen = []
    hook = adapter.model.register_forward_hook(lambda m, args, out: seen.extend(watch(out)))
    kept = [adapter(x), adapter(x)]
    hook.remove()
    gc.collect()
    assert len(seen) > 40
    assert all(reference() is None for reference in seen)
    assert all(not output.requires_grad for output in kept)


def test_surgeon_holds_less_than_eager():
    def held(name):
        torch.manual_seed(0)
        adapter = adapt.METHODS[name](surgeon_fx.zoo.create("resnet20_cifar"))
        found = []
        adapter.model.register_forward_hook(
            lambda m, args, out: found.append(retained_bytes(out, m) if out.requires_grad else 0)
        )
        adapter(torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        return max(found)

    full = held("full")
    assert held("static") < 0.2 * full
    assert held("surgeon") < 0.6 * full
    assert held("surgeon_norm") < 0.5 * full
    assert held("surgeon_css_cr") < 0.6 * full  # two forwards, one graph at a time
