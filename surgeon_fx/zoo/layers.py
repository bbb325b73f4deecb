"""Parts that several of the networks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageNormalizer(nn.Module):
    """(x - mean) / std per channel, so that the pipeline can feed pixels in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", per_channel(mean))
        self.register_buffer("std", per_channel(std))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class DropPath(nn.Module):
    """Stochastic depth: in training, drops a whole sample of a residual branch and scales up those it leaves."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * F.dropout(x.new_ones((x.shape[0], 1, 1, 1)), self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


def per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1)


def conv_bn_relu(c_in: int, c_out: int, kernel: int, dilation: int = 1) -> list[nn.Module]:
    """A same-size convolution without bias, its norm and an in-place ReLU."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(c_in, c_out, kernel, padding=padding, dilation=dilation, bias=False)
    return [conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)]


def init_convs(model: nn.Module) -> None:
    """Convolution weights from N(0, 2 / (k * k * out)), the usual start of a ReLU network."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))


def init_tokens(model: nn.Module) -> None:
    """A vision transformer's usual start: linears of deviation 0.02, convolutions by fan-out per group, no bias."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
