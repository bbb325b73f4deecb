"""The importance pass: the paper's equations on numbers done by hand, and nothing left behind."""

import copy
import gc
import json
import math
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from model_cases import MODELS, watch
from torch import nn

import surgeon_fx
from surgeon_fx.importance import importance_of
from surgeon_fx.retained import retained_bytes


class Chain(nn.Module):
    """Three linear layers of one weight each: y = c * b * a * x. Inputs of 4, 4 and 4 elements, or repeated."""

    def __init__(self, a=1.0, b=2.0, c=0.5):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for layer, value in zip(self.children(), (a, b, c), strict=True):
            nn.init.constant_(layer.weight, value)

    def forward(self, x):
        x = self.first(x)  # m = 4
        x = self.second(x[:2])  # m = 2
        return self.third(x[:1])  # m = 1


def square(y):
    return y.square().sum() / 2


def test_equations_by_hand():
    """x = 3: y = 3, dy/da = x*b*c = 3, dy/db = x*a*c = 1.5, dy/dc = x*a*b = 6; d(y^2/2) = y times those."""
    model = surgeon_fx.transform(Chain())
    found = surgeon_fx.refresh(model, torch.full((4, 1), 3.0), square, samples=None, static_ratio=0.0)
    assert vars(found)["G"] == pytest.approx({"first": 9.0, "second": 4.5, "third": 18.0})
    memory = {"first": math.log(7 / 4), "second": math.log(7 / 2), "third": math.log(7)}
    assert vars(found)["M"] == pytest.approx(memory)
    # M over its largest 0.2876, 0.6438, 1; G over its largest 0.5, 0.25, 1
    assert vars(found)["I"] == pytest.approx({"first": 0.14379, "second": 0.16095, "third": 1.0}, abs=1e-5)
    assert found.p == pytest.approx({"first": 0.85621, "second": 0.83905, "third": 0.0}, abs=1e-5)
    assert found.p["third"] == 0
    assert dict(surgeon_fx.ratios(model)) == found.p


def test_several_weights_give_their_root_mean_square():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(2, 1, bias=False)))
    found = surgeon_fx.refresh(model, torch.tensor([[3.0, 4.0]]), lambda y: y.sum(), static_ratio=0.0)
    assert vars(found)["G"] == pytest.approx({"0": math.sqrt((9 + 16) / 2)})
    assert found.M == {"0": 0.0}
    assert found.p == {"0": 0.0}


def test_ablations():
    gradients, sizes = {"a": 1.0, "b": 2.0}, {"a": 1, "b": 3}
    assert importance_of(gradients, sizes, memory=False).p == {"a": 0.5, "b": 0.0}
    without = importance_of(gradients, sizes, gradient=False).p
    assert without == pytest.approx({"a": 0.0, "b": 1 - math.log(4 / 3) / math.log(4)})
    model = surgeon_fx.transform(Chain())
    x = torch.full((4, 1), 3.0)
    found = surgeon_fx.refresh(model, x, square, samples=None, static_ratio=0.0, memory=False)
    assert found.p == pytest.approx({"first": 0.5, "second": 0.75, "third": 0.0})
    with pytest.raises(ValueError, match="cannot both be left out"):
        surgeon_fx.refresh(model, x, square, gradient=False, memory=False)


@pytest.mark.parametrize("model_name", MODELS)
def test_equals_gradients_of_eager(model_name):
    build, shape = MODELS[model_name]
    torch.manual_seed(0)
    eager, x = build().eval(), torch.randn(shape)
    surgeon_fx.entropy(eager(x)).backward()
    model = surgeon_fx.transform(eager)
    found = surgeon_fx.refresh(model, x, samples=None, static_ratio=0.0)
    layers = dict(eager.named_modules())
    assert set(found.G) == {n for n in surgeon_fx.ratios(model) if layers[n].weight.grad is not None}
    for name, value in found.G.items():
        assert value == pytest.approx(layers[name].weight.grad.square().mean().sqrt().item(), rel=1e-4), name
    assert min(found.p[name] for name in found.G) == 0
    assert all(0 <= ratio <= 1 for ratio in found.p.values())


def test_norm_only_pairs_layers_with_their_own_memories():
    """The published code zips norm layers with the memories of all layers."""
    model = nn.Sequential(nn.Linear(4, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8))
    for layer in (model[0], model[3]):
        layer.weight.requires_grad_(False)
    model = surgeon_fx.transform(model)
    found = surgeon_fx.refresh(model, torch.randn(2, 4), samples=None)
    assert vars(found)["M"] == pytest.approx({"1": -math.log(64 / 72), "4": -math.log(8 / 72)})
    assert found.p["3"] == found.p["1"]  # frozen: what runs behind it follows the trained layer before


def test_leaves_no_trace():
    build, shape = MODELS["network"]
    torch.manual_seed(0)
    model = surgeon_fx.transform(build().train())
    x = torch.randn(shape)
    model(x).sum().backward()
    calls = []
    handle = model.head[0].weight.register_hook(lambda grad: calls.append(grad))
    model.head[0].eval()
    state = copy.deepcopy(model.state_dict())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    np.random.seed(0)
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    surgeon_fx.refresh(model, x)
    handle.remove()
    assert not calls
    assert torch.equal(torch.get_rng_state(), rng[0])
    assert random.getstate() == rng[1]
    assert (np.random.get_state()[1] == rng[2]).all()
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(grads)
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n in grads)


def test_no_graph_survives():
    build, shape = MODELS["network"]
    model = surgeon_fx.transform(build())
    seen = []

    def loss(output):
        seen.extend(watch(output))
        return surgeon_fx.entropy(output)

    found = surgeon_fx.refresh(model, torch.randn(shape), loss)
    gc.collect()
    assert len(seen) > 40
    assert all(reference() is None for reference in seen)
    assert all(type(value) is float for value in found.G.values())


def test_samples_are_random_and_repeatable():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(1, 1)))
    x = torch.arange(100.0).view(-1, 1)
    seen = []

    def loss(output):
        seen.append(output.shape[0])
        return output.sum()

    def sums(seed):
        generator = torch.Generator().manual_seed(seed)
        options = {"samples": 5, "static_ratio": 0.0, "generator": generator}
        return [surgeon_fx.refresh(model, x, loss, **options).G["0"] for _ in range(3)]

    assert sums(0) == sums(0)
    assert len(set(sums(0))) == 3
    assert sums(0) != sums(1)
    assert set(seen) == {5}
    first, second = (surgeon_fx.refresh(model, x, loss, samples=5).G["0"] for _ in range(2))
    assert first != second  # without a generator too, though the global one stands still
    surgeon_fx.refresh(model, x[:3], loss, samples=5)
    assert seen[-1] == 3


def test_inputs_of_several_kinds():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, scale=None):
            return self.layer(x) if scale is None else self.layer(x) * scale

    model, x, scale = surgeon_fx.transform(Two()), torch.randn(4, 2), torch.rand(4, 1)
    with torch.inference_mode():
        made_there = torch.randn(4, 2)
    for inputs in (x, (x,), (x, scale), {"x": x, "scale": scale}, made_there):
        assert surgeon_fx.refresh(model, inputs, samples=2).G["layer"] > 0
    with torch.no_grad():
        assert surgeon_fx.refresh(model, x).G["layer"] > 0
    with pytest.raises(ValueError, match="at least one sample"):
        surgeon_fx.refresh(model, x[:0])
    with pytest.raises(ValueError, match="samples must be at least 1"):
        surgeon_fx.refresh(model, x, samples=0)
    with pytest.raises(ValueError, match="not transformed"):
        surgeon_fx.refresh(nn.Linear(2, 2), x)
    with pytest.raises(ValueError, match="one element"):
        surgeon_fx.refresh(model, x, lambda y: y)


def test_what_cannot_be_told_changes_nothing():
    model, x = surgeon_fx.transform(Chain()), torch.full((4, 1), 3.0)
    surgeon_fx.ratios(model).fill(0.3)
    with pytest.warns(UserWarning, match="not finite"):
        surgeon_fx.refresh(model, x, lambda y: y.sum() * float("nan"))
    with pytest.warns(UserWarning, match="no gradient"):
        surgeon_fx.refresh(model, x, lambda y: torch.zeros(()))
    with pytest.raises(RuntimeError, match="mine"):
        surgeon_fx.refresh(model, x, lambda y: (_ for _ in ()).throw(RuntimeError("mine")))
    assert surgeon_fx.refresh(model, x, lambda y: None).G == {}  # nothing to look at, and nothing wrong
    assert set(surgeon_fx.ratios(model).values()) == {0.3}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.warns(UserWarning, match="no gradient"):
        surgeon_fx.refresh(model, x, square)


def test_result_prints_plots_and_travels(tmp_path):
    found = surgeon_fx.refresh(surgeon_fx.transform(Chain()), torch.full((4, 1), 3.0), square)
    assert "second" in str(found)
    assert surgeon_fx.Importance.from_json(found.to_json()) == found
    assert set(json.loads(found.to_json())) == {"G", "M", "I", "p"}
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's own
        found.plot(tmp_path / "importance.png")
    assert (tmp_path / "importance.png").stat().st_size > 1000


def test_own_peak_is_below_the_step():
    """Ten of 64 samples, at 0.9: a fraction of what the step that follows holds."""
    model = surgeon_fx.transform(surgeon_fx.zoo.create("wrn16_1"))
    held = []
    model.register_forward_hook(lambda module, args, output: held.append(retained_bytes(output, module)))
    x = torch.randn(64, 3, 32, 32)
    surgeon_fx.refresh(model, x)
    model(x)
    assert held[0] < held[1] / 2


def test_parametrized_weights_and_attention_have_a_gradient():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = surgeon_fx.transform(nn.Sequential(layer, nn.LayerNorm(4)))
    assert surgeon_fx.refresh(model, torch.randn(4, 4)).G["0"] > 0
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = surgeon_fx.transform(attention)
    found = surgeon_fx.refresh(model, torch.randn(2, 5, 8), lambda y: y.square().mean())
    assert set(found.G) >= {"self_attn", "linear1", "linear2", "norm1", "norm2"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype))
    assert all(value > 0 for value in surgeon_fx.refresh(model, torch.randn(6, 4, dtype=dtype)).G.values())


def test_autocast_keeps_no_casts_of_the_aliases():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(module.weight)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surgeon_fx.refresh(model, torch.randn(6, 4))
        gc.collect()
        assert seen[0]() is None


def test_targets_are_subsampled_with_the_inputs():
    """Each sample carries its number, and so does its target."""
    torch.manual_seed(0)
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    numbers = torch.arange(20.0)[:, None]
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten()))

    def loss(output, targets):
        seen.append(targets["number"])
        assert targets["weight"] == 2.0
        return output.square().mean()

    found = surgeon_fx.refresh(
        model, numbers, loss, targets={"number": torch.arange(20.0), "weight": torch.tensor(2.0)}, samples=7
    )
    assert found.G
    assert len(seen[0]) == 7
    assert torch.equal(*seen)


def test_with_targets_the_loss_is_the_cross_entropy():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model = surgeon_fx.transform(eager)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    found = surgeon_fx.refresh(model, x, targets=y, samples=None, static_ratio=0.0)
    nn.functional.cross_entropy(eager(x), y).backward()
    expected = {name: float(eager[int(name)].weight.grad.square().mean().sqrt()) for name in ("0", "1")}
    assert vars(found)["G"] == pytest.approx(expected)


def test_a_scaler_changes_the_numbers_of_no_pass():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    x = torch.randn(6, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plain, scaled = (surgeon_fx.refresh(model, x, samples=None, scaler=s) for s in (None, scaler))
    assert vars(plain)["G"] == pytest.approx(vars(scaled)["G"])


@pytest.mark.parametrize("targets", [torch.zeros(10, dtype=torch.long), torch.zeros(5, 16)])
def test_targets_that_are_not_the_batch_s(targets):
    """The pass takes 10 of 16 samples: 10 targets would fit the wrong ones."""
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(40, 3)))
    before = dict(surgeon_fx.ratios(model))
    with pytest.raises(ValueError, match="one for each of the batch's 16 samples.*samples=None"):
        surgeon_fx.refresh(model, torch.randn(16, 40), targets=targets)
    assert dict(surgeon_fx.ratios(model)) == before
