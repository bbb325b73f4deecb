"""ResNet-50 for ImageNet and DeepLabV3+ on top of it, with the layer names of torchvision and RobustNet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgeon_fx.zoo.cifar import conv1x1
from surgeon_fx.zoo.layers import ImageNormalizer, conv_bn_relu, init_convs

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with the stride on the 3x3."""

    def __init__(self, c_in: int, planes: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        c_out = 4 * planes
        self.conv1 = conv1x1(c_in, planes)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = conv1x1(planes, c_out)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or c_in != c_out
        self.downsample = nn.Sequential(conv1x1(c_in, c_out, stride), nn.BatchNorm2d(c_out)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def stage(c_in: int, planes: int, blocks: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """The blocks of one resolution; only the first one has the stride."""
    rest = (Bottleneck(4 * planes, planes, 1, dilation) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(c_in, planes, stride, dilation), *rest)


class ResNet(nn.Module):
    """ResNet v1.5 of bottlenecks."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(64, 64, blocks[0])
        self.layer2 = stage(256, 128, blocks[1], 2)
        self.layer3 = stage(512, 256, blocks[2], 2)
        self.layer4 = stage(1024, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def normalized_resnet50(blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> nn.Sequential:
    """ResNet-50 behind ImageNet's normalisation, as RobustBench wraps it: pixels in [0, 1]."""
    parts = {"normalize": ImageNormalizer(IMAGENET_MEAN, IMAGENET_STD), "model": ResNet(blocks, classes)}
    return nn.Sequential(OrderedDict(parts))


class Aspp(nn.Module):
    """Five looks at one map: its global mean, a 1x1 and three dilated 3x3, concatenated."""

    def __init__(self, c_in: int, c_out: int, rates: Sequence[int]) -> None:
        super().__init__()
        branches = [conv_bn_relu(c_in, c_out, 1), *(conv_bn_relu(c_in, c_out, 3, rate) for rate in rates)]
        self.features = nn.ModuleList(nn.Sequential(*branch) for branch in branches)
        self.img_pooling = nn.AdaptiveAvgPool2d(1)
        self.img_conv = nn.Sequential(*conv_bn_relu(c_in, c_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        whole = upsample(self.img_conv(self.img_pooling(x)), x)
        return torch.cat([whole, *(branch(x) for branch in self.features)], 1)


class DeepLabV3Plus(nn.Module):
    """DeepLabV3+ on ResNet-50 at output stride 16, RobustNet's DeepR50V3PlusD. Logits at the size of the input.

    `aux` adds the head its training used on layer3, so that a checkpoint loads whole; `forward` never runs it.
    """

    def __init__(self, classes: int = 19, blocks: Sequence[int] = (3, 4, 6, 3), aux: bool = False) -> None:
        super().__init__()
        stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.layer0 = nn.Sequential(stem, nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
        self.layer1 = stage(64, 64, blocks[0])
        self.layer2 = stage(256, 128, blocks[1], 2)
        self.layer3 = stage(512, 256, blocks[2], 2)
        self.layer4 = stage(1024, 512, blocks[3], dilation=2)
        self.aspp = Aspp(2048, 256, (6, 12, 18))
        self.bot_fine = nn.Sequential(*conv_bn_relu(256, 48, 1))
        self.bot_aspp = nn.Sequential(*conv_bn_relu(1280, 256, 1))
        self.final1 = nn.Sequential(*conv_bn_relu(304, 256, 3), *conv_bn_relu(256, 256, 3))
        self.final2 = nn.Sequential(nn.Conv2d(256, classes, 1))
        if aux:
            conv = nn.Conv2d(1024, 512, 3, padding=1)
            tail = (nn.BatchNorm2d(512), nn.ReLU(inplace=True), nn.Dropout2d(0.1), nn.Conv2d(512, classes, 1))
            self.dsn = nn.Sequential(conv, *tail)
        init_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.layer1(self.layer0(x))
        deep = self.bot_aspp(self.aspp(self.layer4(self.layer3(self.layer2(fine)))))
        joined = torch.cat([self.bot_fine(fine), upsample(deep, fine)], 1)
        return upsample(self.final2(self.final1(joined)), x)


def upsample(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=True)
