"""Loops of others: accelerate, peft and timm, each three steps against eager at ratio 0, in three precisions."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgeon_fx
from surgeon_fx.retained import nodes, retained_bytes, saved_by

INTERPRETED = surgeon_fx.Config(capture=False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm([16, 8, 8]), nn.GELU(), nn.Flatten(), nn.Linear(16 * 64, 5)
    )


def data(classes=5, size=8, steps=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, size, size, generator=generator), torch.randint(0, classes, (8,), generator=generator))
        for _ in range(steps)
    ]


def assert_same(first, second):
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("precision", "config"), [("no", surgeon_fx.Config()), ("bf16", INTERPRETED), ("fp16", INTERPRETED)]
)
@pytest.mark.filterwarnings("ignore")
def test_accelerate(precision, config):
    """Transform, then prepare."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install surgeon-fx[hf]")

    def train(model):
        accelerate.state.AcceleratorState._reset_state(True)
        try:
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        except ValueError as error:
            pytest.skip(f"accelerate refuses {precision} on this machine: {error}")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in data():
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return model

    eager, model = train(network()), train(surgeon_fx.transform(network(), config))
    assert_same(model, eager)
    (x, _), *_ = data()
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
        surgeon_fx.ratios(model).fill(0.9)
        held = retained_bytes(model(x), model)
        assert surgeon_fx.plan(model, x).saved_bytes == surgeon_fx.explain(model, x).held_bytes == held
        assert held < 0.5 * retained_bytes(eager(x), eager)
    assert surgeon_fx.refresh(model, x).G
    assert surgeon_fx.fit(model, x, budget="64KiB").saved_bytes <= 1 << 16


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["transform first", "peft first"])
def test_peft(order, precision):
    """Frozen layers keep nothing; adapters' inputs are pruned."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install surgeon-fx[hf]")
    lora = partial(peft.LoraConfig, r=4, target_modules=["0", "2"], lora_dropout=0.0, init_lora_weights=False)

    def build(transformed):
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        if transformed and order == "transform first":
            base = surgeon_fx.transform(base, INTERPRETED)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, lora())
        if transformed and order == "peft first":
            model = surgeon_fx.transform(model, surgeon_fx.Config(capture=precision is None))
        return model

    def autocast():
        return contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision)

    def train(model):
        scaler = torch.amp.GradScaler("cpu", enabled=precision is torch.float16)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            with autocast():
                loss = model(torch.randn(32, 64, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model

    eager, model = train(build(False)), train(build(True))
    assert_same(model, eager)
    x = torch.randn(32, 64)
    with autocast():
        surgeon_fx.ratios(model).fill(0.9)
        output = model(x)
        held = retained_bytes(output, model)
        dense = retained_bytes(eager(x), eager)
        assert held < 0.5 * dense
        assert surgeon_fx.explain(model, x).held_bytes == held
        if precision is None:
            assert surgeon_fx.plan(model, x).saved_bytes == held
            whole = {32 * 64 * 4, 32 * 256 * 4}  # inputs of frozen and of adapter layers, as eager keeps them
            own = {p.data_ptr() for p in model.parameters()}
            saved = [t for node in nodes(output) for t in saved_by(node) if t is not None and t.data_ptr() not in own]
            assert not [t for t in saved if t.nbytes in whole]
    if order == "peft first":  # the other order has no adapters in its table: they follow the layers they are put into
        assert surgeon_fx.refresh(model, x, lambda y: y.square().mean()).G


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_timm(precision):
    """What timm's train script does in a step, with `surgeon_fx.transform` after `create_model`."""
    timm = pytest.importorskip("timm", reason="needs timm")
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3, NativeScaler

    def train(transformed):
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=5)
        if transformed:
            model = surgeon_fx.transform(model, surgeon_fx.Config(capture=precision is None))
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2)
        scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3)
        scaler = NativeScaler(device="cpu") if precision is torch.float16 else None
        average = ModelEmaV3(model, decay=0.9)
        model.train()
        for step, (x, y) in enumerate(data(size=32)):
            with contextlib.nullcontext() if precision is None else torch.autocast("cpu", precision):
                loss = F.cross_entropy(model(x), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler(loss, optimizer, parameters=model.parameters(), clip_grad=1.0)
            optimizer.zero_grad()
            average.update(model)
            scheduler.step(step + 1)
        return model, average

    (eager, eager_average), (model, average) = train(False), train(True)
    assert_same(model, eager)
    assert_same(average, eager_average)
    x = data(size=32)[0][0]
    surgeon_fx.ratios(model).fill(0.9)
    assert retained_bytes(model(x), model) < 0.3 * retained_bytes(eager(x), eager)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_adapters_under_autocast(precision):
    """An adapter with a scaler steps as plain torch does with one."""
    from surgeon_fx import adapt

    x = torch.rand(8, 3, 8, 8)
    sgd = partial(torch.optim.SGD, lr=0.1)

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**6) if precision is torch.float16 else None

    eager, model = network().eval(), surgeon_fx.transform(network(), INTERPRETED)
    plain, optimizer = scaler(), sgd(eager.parameters())
    adapter = adapt.StaticSparsity(model, ratio=0.0, optimizer=sgd, scaler=scaler())
    for _ in range(3):
        with torch.autocast("cpu", precision):
            loss = surgeon_fx.entropy(eager(x))
            adapter(x)
        if plain is None:
            loss.backward()
            optimizer.step()
        else:
            plain.scale(loss).backward()
            plain.step(optimizer)
            plain.update()
        optimizer.zero_grad()
    assert_same(model, eager)


def test_a_scaler_that_overflows_backs_off_and_is_part_of_the_state():
    from surgeon_fx import adapt

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    model = network()
    adapter = adapt.Surgeon(model, lr=1e-2, scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.float16):
        adapter(torch.rand(8, 3, 8, 8))
    assert adapter.last.skipped == "a gradient is not finite"
    assert scaler.get_scale() == 2.0**59
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    scaler.update(2.0**6)
    for loss in ("entropy", "sar"):
        other = adapt.Surgeon(network(), lr=1e-2, loss=loss, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**6))
        with torch.autocast("cpu", torch.float16):
            other(torch.rand(8, 3, 8, 8))
        assert other.last.skipped in ("", "no sample was chosen")
    state = adapter.state_dict()
    assert state["scaler"]["scale"] == 2.0**6
    adapter.reset()
    assert scaler.get_scale() == 2.0**60
    adapter.load_state_dict(state)
    assert scaler.get_scale() == 2.0**6
