"""Convolutional networks for 32x32 images: WideResNet, ResNeXt and the plain CIFAR ResNets.

Layers carry the names of the public checkpoints (RobustBench for the first two).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from surgeon_fx.zoo.layers import init_convs, per_channel


def conv3x3(c_in: int, c_out: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, padding=1, groups=groups, bias=False)


def conv1x1(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 1, stride, bias=False)


class WideBlock(nn.Module):
    """Pre-activation block. Where the width changes, the shortcut reads the activated input too."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = conv3x3(c_in, c_out, stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(c_out, c_out)
        self.convShortcut = conv1x1(c_in, c_out, stride) if c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.bn1(x))
        out = self.conv2(self.relu2(self.bn2(self.conv1(active))))
        return (x if self.convShortcut is None else self.convShortcut(active)) + out


class WideGroup(nn.Module):
    """The blocks of one resolution; only the first one has the stride."""

    def __init__(self, blocks: int, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(WideBlock(c_out if i else c_in, c_out, 1 if i else stride) for i in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WideResNet(nn.Module):
    """WRN-depth-width as RobustBench's "Standard": pixels in [0, 1], no normalisation."""

    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10) -> None:
        super().__init__()
        if depth % 6 != 4:
            raise ValueError(f"depth must be 6n + 4 (16, 28, 40), got {depth}")
        blocks = depth // 6
        self.conv1 = conv3x3(3, 16)
        self.block1 = WideGroup(blocks, 16, 16 * width, 1)
        self.block2 = WideGroup(blocks, 16 * width, 32 * width, 2)
        self.block3 = WideGroup(blocks, 32 * width, 64 * width, 2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * width, classes)
        init_convs(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(self.pool(self.relu(self.bn1(x))).flatten(1))


class ResNeXtBlock(nn.Module):
    """Bottleneck with a grouped 3x3."""

    def __init__(self, c_in: int, planes: int, stride: int, cardinality: int, base_width: int) -> None:
        super().__init__()
        inner, c_out = planes * base_width // 64 * cardinality, 4 * planes
        self.conv_reduce = conv1x1(c_in, inner)
        self.bn_reduce = nn.BatchNorm2d(inner)
        self.conv_conv = conv3x3(inner, inner, stride, cardinality)
        self.bn = nn.BatchNorm2d(inner)
        self.conv_expand = conv1x1(inner, c_out)
        self.bn_expand = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or c_in != c_out
        self.downsample = nn.Sequential(conv1x1(c_in, c_out, stride), nn.BatchNorm2d(c_out)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn_reduce(self.conv_reduce(x)))
        out = self.relu(self.bn(self.conv_conv(out)))
        out = self.bn_expand(self.conv_expand(out))
        return self.relu((x if self.downsample is None else self.downsample(x)) + out)


class CifarResNeXt(nn.Module):
    """ResNeXt-29 as AugMix trained it: (x - 0.5) / 0.5 is part of the model."""

    mu: Tensor
    sigma: Tensor

    def __init__(self, depth: int = 29, cardinality: int = 4, base_width: int = 32, classes: int = 100) -> None:
        super().__init__()
        if depth % 9 != 2:
            raise ValueError(f"depth must be 9n + 2 (11, 20, 29), got {depth}")
        self.register_buffer("mu", per_channel([0.5] * 3))
        self.register_buffer("sigma", per_channel([0.5] * 3))

        def stage(c_in: int, planes: int, stride: int) -> nn.Sequential:
            first = ResNeXtBlock(c_in, planes, stride, cardinality, base_width)
            rest = (ResNeXtBlock(4 * planes, planes, 1, cardinality, base_width) for _ in range(depth // 9 - 1))
            return nn.Sequential(first, *rest)

        self.conv_1_3x3 = conv3x3(3, 64)
        self.bn_1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.stage_1 = stage(64, 64, 1)
        self.stage_2 = stage(256, 128, 2)
        self.stage_3 = stage(512, 256, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(1024, classes)
        init_convs(self)
        nn.init.kaiming_normal_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mu) / self.sigma
        x = self.relu(self.bn_1(self.conv_1_3x3(x)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        return self.classifier(self.pool(x).flatten(1))


class CifarBlock(nn.Module):
    """Two 3x3 convolutions; a shortcut that changes shape drops pixels and adds empty channels, without parameters."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(c_in, c_out, stride)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = conv3x3(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.stride = stride
        self.padding = (c_out - c_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return self.relu(out + x)


class CifarResNet(nn.Module):
    """The 6n + 2 layer ResNet of the first ResNet paper, widths 16, 32 and 64."""

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        if depth % 6 != 2:
            raise ValueError(f"depth must be 6n + 2 (20, 32, 56), got {depth}")

        def stage(c_in: int, c_out: int, stride: int) -> nn.Sequential:
            rest = (CifarBlock(c_out, c_out, 1) for _ in range(depth // 6 - 1))
            return nn.Sequential(CifarBlock(c_in, c_out, stride), *rest)

        self.conv1 = conv3x3(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(16, 16, 1)
        self.layer2 = stage(16, 32, 2)
        self.layer3 = stage(32, 64, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(self.pool(x).flatten(1))
