"""Small networks to adapt."""

from torch import nn

from surgeon_fx import adapt

LEARNING = [name for name in adapt.METHODS if name not in ("source", "bn_stat")]


class Unit(nn.Module):
    """What checkpointing takes as one."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

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
