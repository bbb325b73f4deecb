"""Models of the zoo, small or without memory."""

import torch

from surgeon_fx import zoo

SMALL_OPTIONS = {
    "wrn28_10": {"depth": 10, "width": 1},
    "resnext29": {"depth": 11},
    "resnet50": {"blocks": (1, 1, 1, 1)},
    "deeplabv3plus_r50": {"blocks": (1, 1, 1, 1)},
    "segformer_b5": {"depths": (1, 1, 1, 1), "dims": (8, 16, 40, 64), "head_dim": 16},
}


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.create(name, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())
