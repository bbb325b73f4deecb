"""Lightning: as eager at ratio 0, within a budget, and the model is as it was afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgeon_fx
from surgeon_fx.retained import retained_bytes

pytest.importorskip("lightning", reason="needs lightning: pip install surgeon-fx[lightning]")

import lightning

from surgeon_fx.integrations.lightning import SurgeonCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
INTERPRETED = surgeon_fx.Config(capture=False)


def layers():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 5)
    )


class Whole(lightning.LightningModule):
    """With a forward of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = layers()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Parts(Whole):
    """Whose step calls a part."""

    forward = lightning.LightningModule.forward

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Two(Parts):
    def __init__(self):
        super().__init__()
        self.other = layers()


def batches():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, 8, 8, generator=generator), torch.randint(0, 5, (24,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def fit(model, folder, callbacks=(), **options):
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(model, batches())
    return trainer


@pytest.mark.parametrize(
    ("make", "precision", "config"),
    [
        (Whole, "32-true", surgeon_fx.Config()),
        (Parts, "32-true", INTERPRETED),
        (Whole, "bf16-mixed", INTERPRETED),
        (Whole, "16-mixed", INTERPRETED),
    ],
)
def test_three_steps_equal_eager(tmp_path, make, precision, config, capsys):
    eager, model = make(), make()
    fit(eager, tmp_path, precision=precision)
    fit(model, tmp_path, [SurgeonCallback(config=config)], precision=precision)
    assert "at 8x3x8x8, rewritten" in capsys.readouterr().out
    for (name, a), b in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(model.net[4].weight, make().net[4].weight)
    x = torch.randn(8, 3, 8, 8)
    assert retained_bytes(model.net(x), model) == retained_bytes(eager.net(x), eager)  # as it was


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ratios_follow_the_data_within_a_budget(tmp_path, precision):
    x = next(iter(batches()))[0]
    eager, model = Whole(), Whole()
    budget = retained_bytes(eager(x), eager) // 2
    held = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            with trainer.precision_plugin.forward_context():
                held.append((retained_bytes(module(x), module), dict(surgeon_fx.ratios(module))))

    callback = SurgeonCallback(budget=budget, refresh_every=2, config=INTERPRETED, print_plan=False)
    trainer = fit(model, tmp_path, [callback, Watch()], precision=precision, enable_checkpointing=False)
    assert all(0.5 * budget < size <= budget for size, _ in held), (budget, held)
    assert held[0][1] != held[1][1]
    assert callback.pruning.importance.G
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Whole.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.net[0].weight, model.net[0].weight)


def test_the_part_must_be_named_where_there_are_two(tmp_path):
    with pytest.raises(ValueError, match="module must name the part"):
        fit(Two(), tmp_path, [SurgeonCallback()])
    model = Two()
    callback = SurgeonCallback(module="net", ratio=0.9, config=INTERPRETED, print_plan=False, keep=True)
    fit(model, tmp_path, [callback])
    assert set(surgeon_fx.ratios(model).values()) == {0.9}
    assert set(surgeon_fx.ratios(model)) == {"0", "1", "4"}
