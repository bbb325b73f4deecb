"""Adapters among what users bring: optimizers, schedulers, inputs, outputs, modes, states and errors."""

import copy
import dataclasses
import functools
from collections import OrderedDict

import pytest
import torch
from adapt_cases import Small
from torch import nn

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.adapt.augment import augment
from surgeon_fx.modules import blocks


def test_users_own_optimizer_scheduler_and_loss(model, x):
    seen = []

    def loss(output):
        seen.append(output.shape)
        return output.square().mean() if len(seen) > 1 else None

    adapter = adapt.FullTuning(
        model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        loss_fn=loss,
    )
    adapter(x)
    assert adapter.last.skipped == "no sample was chosen"
    assert adapter.optimizer.param_groups[0]["lr"] == 0.5
    adapter(x)
    assert adapter.optimizer.param_groups[0]["lr"] == 0.25
    own = torch.optim.Adam(model.parameters(), lr=0.1)
    assert adapt.Surgeon(model, optimizer=own).optimizer is own
    with pytest.raises(ValueError, match="none of the parameters"):
        adapt.FullTuning(model, optimizer=torch.optim.Adam(Small().parameters()))
    with pytest.raises(ValueError, match="lr"):
        adapt.FullTuning(model, optimizer=own, lr=0.1)
    with pytest.raises(ValueError, match="no labels|class scores"):
        adapt.FullTuning(nn.Linear(3, 3))(torch.randn(3))
    chosen = adapt.Surgeon(model, train=lambda name, parameter: name.startswith("head"))
    assert set(chosen.trained) == {"head.weight", "head.bias"}
    chosen(x)


def test_state_travels(model, x):
    adapter = adapt.Surgeon(model, css=True, cr=True, lr=1e-2, on_shift=True, every=2)
    adapter(x)
    state = copy.deepcopy(adapter.state_dict())
    expected = adapter(x), adapter(x)
    other = adapt.Surgeon(Small(), css=True, cr=True, lr=1e-2, on_shift=True, every=2)
    other.model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert torch.equal(other(x), expected[0])
    assert torch.equal(other(x), expected[1])
    with pytest.raises(ValueError, match="state must be of Tent"):
        adapt.Tent(model).load_state_dict(state)
    with pytest.raises(ValueError, match="resettable"):
        adapt.Surgeon(model, resettable=False).reset()


def test_conflicting_options(model):
    for options, match in (
        ({"css": True, "loss_fn": surgeon_fx.entropy}, "css"),
        ({"augment": augment}, "cr=True"),
        ({"norm_only": True, "train": "all"}, "norm_only"),
        ({"static_ratio": 2.0}, "ratio"),
    ):
        with pytest.raises(ValueError, match=match):
            adapt.Surgeon(model, **options)
    with pytest.raises(TypeError, match="Module"):
        adapt.FullTuning(lambda x: x)


def test_under_no_grad_and_inference_mode(model, x):
    expected = copy.deepcopy(model)
    adapt.Surgeon(expected)(x)
    for mode in (torch.no_grad, torch.inference_mode):
        own = copy.deepcopy(model)
        adapter = adapt.Surgeon(own)
        with mode():
            made_there = x.clone()
            adapter(made_there)
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), expected.parameters(), strict=True))


def test_normalisation_in_front(x):
    entry = surgeon_fx.zoo.entry("resnet20_cifar")
    normalise = surgeon_fx.zoo.layers.ImageNormalizer(entry.mean, entry.std)
    model = nn.Sequential(OrderedDict(normalize=normalise, model=surgeon_fx.zoo.create("resnet20_cifar")))
    adapter = adapt.Surgeon(model, css=True, cr=True)
    assert adapter(torch.rand(4, 3, 32, 32)).shape == (4, 10)
    assert all(name.startswith("model.") for name in adapter.importance.G)


class Named(nn.Module):
    """Takes its images by name, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.inner = Small()

    def forward(self, pixel_values, scale=None):
        return self.inner(pixel_values if scale is None else pixel_values * scale.view(-1, 1, 1, 1))


def test_consistency_with_a_batch_of_names():
    torch.manual_seed(0)
    model, x = Named(), torch.rand(4, 3, 16, 16)
    same = copy.deepcopy(model)
    adapter = adapt.Surgeon(model, cr=True, lr=1e-2)
    logits = [adapter({"pixel_values": x, "scale": torch.ones(4)}) for _ in range(2)]
    plain = adapt.Surgeon(same, cr=True, lr=1e-2)
    assert all(torch.equal(plain(x), expected) for expected in logits)
    assert not torch.equal(*logits)


def test_consistency_refuses_names_without_images():
    adapter = adapt.Surgeon(Named(), cr=True)
    with pytest.raises(ValueError, match="augment= for a batch of first, second"):
        adapter({"first": torch.rand(4, 16), "second": torch.rand(4, 3)})
    assert adapter.batches == 0


def test_one_autocast_block_around_many_batches(model, x):
    """Autocast keeps casts of the weights until its block ends; an update makes them stale."""
    adapter = adapt.FullTuning(model, lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = adapter(x), adapter(x)
    adapter.reset()
    for expected in (first, second):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(adapter(x), expected)
    assert not torch.equal(first, second)


def test_models_of_several_inputs(x):
    class Two(Small):
        def forward(self, x, scale):
            return super().forward(x * scale)

    scale = torch.rand(8, 1, 1, 1)
    for name in ("source", "full", "surgeon"):
        first = adapt.METHODS[name](Two())((x, scale))
        assert first.shape == (8, 3)
        assert adapt.METHODS[name](Two())({"x": x, "scale": scale}).shape == (8, 3)


def test_optimizers_that_hold_more_or_less(model, x):
    surgeon_fx.entropy(model.train()(x)).backward()
    before = model.conv.weight.clone()
    adapter = adapt.Tent(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    adapter(x)
    assert torch.equal(model.conv.weight, before)  # old gradients are not stepped
    less = adapt.FullTuning(model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1))
    assert set(less.trained) == {"head.weight", "head.bias"}


def test_schedulers(model, x):
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9)
    adapter = adapt.FullTuning(model, lr=0.5, scheduler=plateau)
    for _ in range(3):
        adapter(x)
    assert adapter.optimizer.param_groups[0]["lr"] < 0.5
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    with pytest.raises(ValueError, match="adapter's optimizer"):
        adapt.FullTuning(model, scheduler=other)


def test_state_is_copied(model, x):
    first, second = adapt.FullTuning(model), adapt.FullTuning(Small())
    first(x)
    second.load_state_dict(first.state_dict())
    moments = [a.optimizer.state[a.trained["conv.weight"]]["exp_avg"] for a in (first, second)]
    assert torch.equal(*moments)
    assert moments[0].data_ptr() != moments[1].data_ptr()
    scheduled = adapt.FullTuning(model, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    with pytest.raises(ValueError, match="same optimizer, scheduler"):
        scheduled.load_state_dict(first.state_dict())
    with torch.inference_mode():
        first.reset()
    first(x)


def test_what_comes_in_and_goes_out_has_no_history(model, x):
    encoder = nn.Conv2d(3, 3, 1)
    adapt.FullTuning(model)(encoder(x))
    assert encoder.weight.grad is None

    @dataclasses.dataclass
    class Found:
        logits: torch.Tensor

    class Named(dict):
        pass

    for wrap in (lambda out: Found(out), lambda out: Named(logits=out), lambda out: [out, {"a": out}]):
        inner = Small()
        inner.register_forward_hook(lambda module, args, out, wrap=wrap: wrap(out))
        found = adapt.FullTuning(inner, loss_fn=lambda out: None)(x)
        assert type(found) is type(wrap(x))
        leaf = found.logits if isinstance(found, Found) else found["logits"] if isinstance(found, dict) else found[0]
        assert not leaf.requires_grad


def test_an_error_in_backward_leaves_nothing(model, x):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        adapt.Surgeon(model, loss_fn=lambda out: out.sum() + Fails.apply(out), every=None, samples=2)(x)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training


def test_nothing_to_rank_keeps_the_static_ratio(model, x):
    adapter = adapt.Surgeon(model, train=lambda name, parameter: name.endswith("bias"), static_ratio=0.8)
    with pytest.warns(UserWarning, match="no gradient"):
        adapter(x)
    assert set(surgeon_fx.ratios(adapter.model).values()) == {0.8}
    assert not adapter.last.skipped
    assert not adapter.last.refreshed


def test_compiled_models_are_refused(model):
    with pytest.raises(ValueError, match="transform it first"):
        adapt.Surgeon(torch.compile(model))


def test_a_block_in_two_places_is_checkpointed_once(x):
    class Twice(Small):
        def __init__(self):
            super().__init__()
            self.again = nn.ModuleList(self.blocks)

    model = Twice()
    assert list(blocks(model)) == ["blocks.0"]
    adapt.Checkpointed(model)(x)
    assert "forward" not in model.blocks[0].__dict__
