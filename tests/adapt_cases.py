"""Small networks to adapt."""

import torch
from torch import nn

from surgeon_fx import adapt

LEARNING = [name for name in adapt.METHODS if name not in ("source", "bn_stat")]
TEACHERS = ["rotta", "cotta"]
OWN_STATISTICS = ["rotta", "mecta", "mecta_eata", "ecotta"]


def build(name, model, **options):
    """The adapter of a name, ready to adapt: in small where it waits for many samples, or for labelled ones."""
    if name == "rotta":
        options = {"capacity": 4, **options}
    if name == "ecotta":
        options = {"parts": 1, **options}
    if name == "sar":
        options = {"floor": 0.0, **options}  # so small a network is too sure for it
    if name == "surgeon_norm_sar":
        options = {"loss": adapt.SarLoss(floor=0.0), **options}
    adapter = adapt.METHODS[name](model, **options)
    if name == "ecotta":
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, 8, 3, 12, 12, generator=generator)
        y = torch.randint(0, 3, (2, 8), generator=generator)
        adapter.warm_up(list(zip(x, y, strict=True)), epochs=2)
    return adapter


class Unit(nn.Module):
    """What checkpointing takes as one."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class Small(nn.Module):
    """Conv, batch norm, ReLU, dropout, linear."""

    def __init__(self, classes=3):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Unit())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, classes)
        nn.init.normal_(self.head.weight, std=5.0)  # sure of some samples

    def forward(self, x):
        x = self.blocks(self.act(self.norm(self.conv(x))))
        return self.head(self.drop(x.mean((2, 3))))


class Pixels(nn.Module):
    """Maps of class scores."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        return {"out": self.body(x)}


def seeing(model):
    """A model as adapters have it during a step: evaluation mode, and batch norms that see the batch."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return model
