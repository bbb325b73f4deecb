"""The planner: predicted equals measured, integer for integer, without running anything."""

import copy
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cases import Attention, Network
from torch import nn

import surgeon_fx
from surgeon_fx.planner import arithmetic, facts
from surgeon_fx.planner.fit import parse_bytes
from surgeon_fx.planner.measure import measured_peak
from surgeon_fx.retained import retained_bytes

MODELS = {
    "wrn16_1": (2, 3, 32, 32),
    "resnext29": (2, 3, 16, 16),
    "resnet20_cifar": (4, 3, 32, 32),
    "vit_cifar": (3, 3, 32, 32),
    "segformer_b0": (1, 3, 64, 64),
    "tv:resnet18": (2, 3, 64, 64),
    "timm:mobilenetv3_small_050": (2, 3, 64, 64),
    "timm:test_convnext": (2, 3, 64, 64),
}

FEWER_BLOCKS = {"resnext29": {"depth": 11}, "segformer_b0": {"depths": (1, 1, 1, 1)}}


class FirstToken(nn.Module):
    """Its head keeps a small view of something large."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.head((self.layer(x) + 1)[:, 0])


OWN = {"token": (FirstToken, (2, 100, 64)), "network": (Network, (4, 3, 24, 24)), "attention": (Attention, (3, 40, 16))}


def build(name):
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name][0](), OWN[name][1]
    return surgeon_fx.zoo.create(name, **FEWER_BLOCKS.get(name, {})), MODELS[name]


def measured(model, shape, dtype=torch.float32):
    return retained_bytes(model(torch.randn(shape, dtype=dtype)), model)


def freeze(model, which):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(which(name, parameter))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", [*MODELS, *OWN])
def test_saved_equals_measured(name, training):
    model, shape = build(name)
    model.train(training)
    assert surgeon_fx.plan(model, shape).saved_bytes == measured(model, shape)
    transformed = surgeon_fx.transform(model)
    for ratio in (0.0, 0.5, 0.9):
        planned = surgeon_fx.plan(transformed, shape, ratios=ratio).saved_bytes
        surgeon_fx.ratios(transformed).fill(ratio)
        assert planned == measured(transformed, shape) == surgeon_fx.plan(transformed, shape).saved_bytes


@pytest.mark.parametrize("exact_saves", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["vit_cifar", "segformer_b0", "network", "attention"])
def test_saved_equals_measured_when_rounded(name, exact_saves):
    model, shape = build(name)
    check_options(model, shape, exact_saves=exact_saves)


@pytest.mark.parametrize("exact_saves", [None, "int8"])
@pytest.mark.parametrize("name", ["wrn16_1", "vit_cifar", "segformer_b0", "tv:resnet18", "network", "attention"])
def test_saved_equals_measured_when_shared(name, exact_saves):
    model, shape = build(name)
    check_options(model, shape, share_saves=True, exact_saves=exact_saves)


def check_options(model, shape, **options):
    """Planned is measured, rows add up, and the table of one plan gives the bytes of any other ratio."""
    eager = surgeon_fx.plan(model, shape).saved_bytes
    transformed = surgeon_fx.transform(model, surgeon_fx.Config(**options))
    savings = facts.step(transformed, [shape], {}, 0.5, backward=False).savings
    table = surgeon_fx.ratios(transformed)
    for ratios in (0.0, 0.5, 0.9, *({name: i % 3 / 3 for i, name in enumerate(table, start)} for start in range(3))):
        plan = surgeon_fx.plan(transformed, shape, ratios=ratios)
        table.fill(ratios) if isinstance(ratios, float) else table.update(ratios)
        assert plan.saved_bytes == measured(transformed, shape)
        assert arithmetic.held_bytes(savings, dict(table)) == plan.saved_bytes
        assert sum(row.held_bytes for row in plan.rows) == plan.saved_bytes
        assert plan.eager_bytes == eager


@pytest.mark.parametrize("name", ["wrn16_1", "vit_cifar", "tv:resnet18"])
def test_saved_equals_measured_in_bfloat16(name):
    model, shape = build(name)
    transformed = surgeon_fx.transform(model.to(torch.bfloat16))
    surgeon_fx.ratios(transformed).fill(0.7)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert surgeon_fx.plan(transformed, x).saved_bytes == measured(transformed, shape, torch.bfloat16)


@pytest.mark.parametrize("train", ["all", "norm", "late"])
@pytest.mark.parametrize("name", ["wrn16_1", "vit_cifar", "segformer_b0"])
def test_saved_equals_measured_when_partly_frozen(name, train):
    model, shape = build(name)
    late = {n for n, _ in list(model.named_parameters())[-12:]}
    which = (lambda n, p: n in late) if train == "late" else train
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.6)
    planned = surgeon_fx.plan(transformed, shape, train=which).saved_bytes
    freeze(model, facts.trains(model, which))
    assert planned == measured(transformed, shape)


@cache
def transformed_once(name):
    """Ratios capture nothing again: one model serves all examples."""
    model, shape = build(name)
    return surgeon_fx.transform(model), shape


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["wrn16_1", "vit_cifar", "segformer_b0", "network", "attention"]))
def test_any_ratios(data, name):
    transformed, shape = transformed_once(name)
    table = surgeon_fx.ratios(transformed)
    ratio = st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
    table.update({layer: data.draw(ratio) for layer in table})
    real = measured(transformed, shape)
    assert surgeon_fx.plan(transformed, shape).saved_bytes == real
    savings = facts.step(transformed, [shape], {}, 0.5, backward=False).savings
    assert arithmetic.held_bytes(savings, dict(table)) == real


def test_plans_on_the_meta_device_and_leaves_no_trace():
    with torch.device("meta"):
        meta = surgeon_fx.zoo.create("wrn16_1")
    real, shape = build("wrn16_1")
    before = copy.deepcopy(real.state_dict())
    state = torch.get_rng_state()
    expected = surgeon_fx.plan(surgeon_fx.transform(real), shape, ratios=0.9)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in real.state_dict().items())
    assert all(p.grad is None for p in real.parameters())
    actual = surgeon_fx.plan(surgeon_fx.transform(meta), torch.empty(shape, device="meta"), ratios=0.9)
    assert (actual.saved_bytes, actual.peak_bytes) == (expected.saved_bytes, expected.peak_bytes)


def test_rows_add_up():
    model, shape = build("wrn16_1")
    plan = surgeon_fx.plan(surgeon_fx.transform(model), shape, ratios=0.9)
    assert sum(row.held_bytes for row in plan.rows) == plan.saved_bytes
    assert plan.eager_bytes == surgeon_fx.plan(model, shape).saved_bytes
    assert sum(row.share for row in plan.rows) == pytest.approx(1)
    assert plan.peak_bytes > plan.saved_bytes
    assert plan.peak_at.split()[0] in ("forward", "backward")
    assert plan.paper_cache_bytes < plan.paper_cache_bytes_with_mask < surgeon_fx.plan(model, shape).paper_cache_bytes


@pytest.mark.parametrize("ratio", [None, 0.0, 0.9])
@pytest.mark.parametrize("name", ["wrn16_1", "resnet20_cifar", "vit_cifar"])
def test_peak_is_that_of_the_allocator(name, ratio):
    model, (_, *image) = build(name)
    model = model if ratio is None else surgeon_fx.transform(model)
    shape = (16, *image)
    if ratio is not None:
        surgeon_fx.ratios(model).fill(ratio)
    planned = surgeon_fx.plan(model, shape)
    between, inside = measured_peak(model, torch.randn(shape))
    assert planned.peak_bytes == pytest.approx(between, rel=0.03)
    assert inside >= between


class Fan(nn.Module):
    """Backward ends in a sum of two gradients: of new ones, or of one that is held elsewhere."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.ones(256, 256)), held
        self.register_buffer("matrix", torch.ones(256, 256))

    def forward(self, x):
        x = x + self.weight
        return x + x.t().t() if self.held else (x @ self.matrix, x @ self.matrix)


@pytest.mark.parametrize("held", [False, True])
def test_sums_of_gradients_are_in_place_where_autograd_adds_in_place(held):
    model = Fan(held)
    planned = surgeon_fx.plan(model, (256, 256))
    assert planned.peak_bytes == measured_peak(model, torch.randn(256, 256))[0]


@pytest.mark.parametrize("name", ["wrn16_1", "vit_cifar"])
@pytest.mark.parametrize("close", [0.98, 0.95], ids=["apart", "shared"])  # sharing makes steps of a whole activation
def test_fit_meets_every_budget_closely_and_in_order(name, close):
    model, shape = build(name)
    transformed = surgeon_fx.transform(model, surgeon_fx.Config(share_saves=close < 0.98))
    least, most = (surgeon_fx.plan(transformed, shape, ratios=ratio).saved_bytes for ratio in (1.0, 0.0))
    before = 0
    for step in range(1, 8):
        budget = least + (most - least) * step // 8
        found = surgeon_fx.fit(transformed, shape, budget=budget)
        surgeon_fx.ratios(transformed).update(found.ratios)
        held = measured(transformed, shape)
        assert held == found.saved_bytes
        assert close * budget <= held <= budget
        assert held >= before
        before = held
    assert surgeon_fx.fit(transformed, shape, budget="1GiB").ratios == dict.fromkeys(
        surgeon_fx.ratios(transformed), 0.0
    )
    with pytest.raises(ValueError, match=f"the least possible is {least}"):
        surgeon_fx.fit(transformed, shape, budget=least - 1)


def test_fit_for_the_peak_and_with_importance():
    model, shape = build("wrn16_1")
    transformed = surgeon_fx.transform(model)
    budget = surgeon_fx.plan(transformed, shape, ratios=0.5).peak_bytes
    found = surgeon_fx.fit(transformed, shape, budget=budget, what="peak")
    assert 0.9 * budget <= found.peak_bytes <= budget
    important = dict.fromkeys(surgeon_fx.ratios(transformed), 0.01) | {"fc": 1.0, "conv1": 1.0}
    found = surgeon_fx.fit(transformed, shape, budget=budget // 2, importance=important)
    assert found.ratios["conv1"] == 0
    assert max(found.ratios.values()) > 0.5


def test_mistakes_are_named():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="call surgeon_fx.transform"):
        surgeon_fx.fit(nn.Linear(2, 2), (1, 2), budget=3)
    with pytest.raises(ValueError, match="budget must be bytes like '512MiB', got 'much'"):
        surgeon_fx.fit(model, (1, 2), budget="much")
    with pytest.raises(ValueError, match="train must be"):
        surgeon_fx.plan(model, (1, 2), train="some")
    with pytest.raises(ValueError, match="importance names layers that are not there: x"):
        surgeon_fx.fit(model, (1, 2), budget=3, importance={"x": 1.0})
    assert parse_bytes("1.5 KiB") == 1536


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize(
    "function", [lambda x: x * x.mean().item(), lambda x: x if x.mean() > 0 else -x, lambda x: x[x > 0]]
)
def test_a_model_that_reads_numbers_has_no_plan(function, transformed):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return function(self.layer(x))

    model = surgeon_fx.transform(Reads()) if transformed else Reads()
    with pytest.raises(ValueError, match="reads a number out of a tensor.*explain"):
        surgeon_fx.plan(model, (2, 4))
