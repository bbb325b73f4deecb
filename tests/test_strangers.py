"""What a reader of the README alone ran into."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

import surgeon_fx


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), 1.0

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.2
        return self.layer(x) * self.scale


def test_a_float_that_changes_in_every_step():
    eager = Annealed()
    model, x = surgeon_fx.transform(copy.deepcopy(eager)), torch.randn(32, 64)
    for _ in range(4):
        expected, actual = gradients(eager, x), gradients(model, x)
        assert model.scale == eager.scale
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


LAYERS = {
    "conv": (lambda: nn.Conv2d(16, 32, 3, padding=1), (4, 16, 32, 32)),
    "linear": (lambda: nn.Linear(64, 32), (256, 64)),
    "layer norm": (lambda: nn.LayerNorm(64), (256, 64)),
    "batch norm": (lambda: nn.BatchNorm2d(16), (4, 16, 32, 32)),
}


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_model_that_is_one_layer(name, capture):
    build, shape = LAYERS[name]
    layer, x = build(), torch.randn(shape)
    model = surgeon_fx.transform(copy.deepcopy(layer), surgeon_fx.Config(capture=capture))
    expected = gradients(layer, x)
    assert all(torch.equal(value, expected[key]) for key, value in gradients(model, x).items())
    surgeon_fx.ratios(model).fill(0.9)
    pruned = gradients(model, x)
    assert not torch.equal(pruned["weight"], expected["weight"])
    x = x.requires_grad_()
    found = surgeon_fx.explain(model, x)
    assert found.held_bytes < 0.2 * x.nbytes
    assert surgeon_fx.plan(model, x).saved_bytes == found.held_bytes
    inside = surgeon_fx.transform(nn.Sequential(copy.deepcopy(layer)))
    assert surgeon_fx.plan(inside, x, ratios=0.9).saved_bytes == found.held_bytes
    surgeon_fx.refresh(model, x.detach(), loss_fn=lambda output: output.square().mean())
    assert list(surgeon_fx.ratios(model)) == [""]


def test_one_layer_behind_another_model_keeps_its_ratio():
    first, second = (surgeon_fx.transform(nn.Sequential(nn.Linear(64, 64)) if i else nn.Linear(64, 64)) for i in (1, 0))
    surgeon_fx.ratios(first).fill(0.5)
    surgeon_fx.ratios(second).fill(0.9)
    held = surgeon_fx.explain(second, first(torch.randn(256, 64))).held_bytes
    assert held < 0.4 * 256 * 64 * 4 + surgeon_fx.plan(first, torch.randn(256, 64)).saved_bytes


def test_a_table_that_is_asked_for_after_the_first_step():
    torch._dynamo.reset()
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(256, 64)
    compiled = torch.compile(net, backend="surgeon_fx")
    exact = gradients(compiled, x)
    surgeon_fx.ratios(compiled).fill(0.9)
    pruned = gradients(compiled, x)
    assert not torch.equal(pruned["_orig_mod.2.weight"], exact["_orig_mod.2.weight"])
    assert torch.equal(pruned["_orig_mod.2.bias"], exact["_orig_mod.2.bias"])


def test_plans_of_inputs_that_need_gradients():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.SiLU())
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    model, x = surgeon_fx.transform(net), torch.randn(4, 3, 32, 32)
    for given in (x, x.clone().requires_grad_(), x):
        for ratio in (0.0, 0.9):
            surgeon_fx.ratios(model).fill(ratio)
            assert surgeon_fx.plan(model, given).saved_bytes == surgeon_fx.explain(model, given).held_bytes


def test_an_error_of_the_model_is_all_that_is_said(caplog, capfd):
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)))
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3))
    assert not caplog.records
    assert len(capfd.readouterr().err) < 500


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit is deprecated
def test_arguments_that_are_refused():
    net = nn.Sequential(nn.Linear(3, 8))
    with pytest.raises(ValueError, match="model is a torch.jit one"):
        surgeon_fx.transform(torch.jit.trace(net, torch.randn(2, 3)))
    with pytest.raises(TypeError, match="config must be a surgeon_fx.Config, got str"):
        surgeon_fx.transform(net, config="x")
    with pytest.raises(TypeError, match="filter_fn must be a function"):
        surgeon_fx.transform(net, filter_fn=3)


@pytest.mark.parametrize("door", ["transform", "compile"])
def test_memory_that_is_filled_again_behind_torchs_back(door):
    """A buffer that numpy refills has other data and the same version: an older graph's save of it is of no use."""
    model, buffer = nn.Sequential(nn.Linear(256, 64)), np.random.randn(64, 256).astype("float32")
    model = surgeon_fx.transform(model) if door == "transform" else torch.compile(model, backend="surgeon_fx")
    surgeon_fx.ratios(model).fill(0.5)
    x = torch.from_numpy(buffer)
    earlier = model(x)
    buffer[:] = np.random.randn(64, 256)
    actual, expected = gradients(model, x), gradients(model, x.clone())
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    del earlier


def test_another_models_graph_changes_nothing():
    x = torch.randn(64, 256)
    model, other = (surgeon_fx.transform(nn.Sequential(nn.Linear(256, 64))) for _ in range(2))
    surgeon_fx.ratios(model).fill(0.95)
    surgeon_fx.ratios(other).fill(0.5)
    expected, held = gradients(model, x), surgeon_fx.explain(model, x).held_bytes
    alive = other(x)
    actual = gradients(model, x)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert surgeon_fx.explain(model, x).held_bytes == held == surgeon_fx.plan(model, x).saved_bytes
    del alive


def test_plan_and_explain_of_the_second_door():
    def build():
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))

    x = torch.randn(4, 3, 16, 16)
    transformed, compiled = surgeon_fx.transform(build()), torch.compile(build(), backend="surgeon_fx")
    for model in (transformed, compiled):
        surgeon_fx.ratios(model).fill(0.9)
    expected = surgeon_fx.plan(transformed, x).saved_bytes
    found = surgeon_fx.explain(compiled, x)
    assert found.held_bytes == expected == surgeon_fx.plan(compiled, x).saved_bytes
    assert found.graphs
    assert found.handled_share == 1.0
    assert surgeon_fx.fit(compiled, x, budget=2 * expected).ratios.keys() == surgeon_fx.ratios(compiled).keys()
    with pytest.raises(ValueError, match="model._orig_mod is as it was"):
        surgeon_fx.restore(compiled)


def test_lazy_layers_are_refused_until_they_have_weights():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match="its part 0 is lazy, and has no weights yet: run the model once"):
        surgeon_fx.transform(model)
    model(torch.randn(4, 16))
    surgeon_fx.transform(model)(torch.randn(4, 16)).sum().backward()
