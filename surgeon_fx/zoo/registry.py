"""The zoo's own models by name, and the way to those of other packages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from surgeon_fx.zoo.cifar import CifarResNet, CifarResNeXt, WideResNet
from surgeon_fx.zoo.external import SOURCES, require, unknown
from surgeon_fx.zoo.layers import ImageNormalizer
from surgeon_fx.zoo.resnet import IMAGENET_MEAN, IMAGENET_STD, DeepLabV3Plus, normalized_resnet50
from surgeon_fx.zoo.segformer import SegFormer
from surgeon_fx.zoo.vit import VisionTransformer

CIFAR = (200, 3, 32, 32)
Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo. `mean` and `std` are what its caller has to apply; None where pixels in [0, 1] go in."""

    name: str
    build: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    summary: str
    mean: Channels | None = None
    std: Channels | None = None


def _normalised(
    name: str, build: Callable[..., nn.Module], input_shape: tuple[int, ...], classes: int, summary: str
) -> Entry:
    return Entry(name, build, input_shape, classes, summary, IMAGENET_MEAN, IMAGENET_STD)


segformer_b0 = partial(SegFormer, depths=(2, 2, 2, 2), dims=(32, 64, 160, 256), head_dim=256)


def segformer_camvid(**options: Any) -> nn.Sequential:
    """A SegFormer below B0's size behind ImageNet's normalisation, for the eleven classes of CamVid."""
    size = {"depths": (2, 2, 2, 2), "dims": (32, 64, 128, 192), "heads": (1, 2, 4, 6), "head_dim": 128, "classes": 11}
    normalize = ImageNormalizer(IMAGENET_MEAN, IMAGENET_STD)
    return nn.Sequential(OrderedDict(normalize=normalize, model=SegFormer(**{**size, **options})))


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "wrn28_10",
            partial(WideResNet, depth=28, width=10),
            CIFAR,
            10,
            "WideResNet-28-10, RobustBench Standard, CIFAR-10",
        ),
        Entry("wrn16_1", partial(WideResNet, depth=16, width=1), CIFAR, 10, "the smallest WideResNet, for tests"),
        Entry("resnext29", CifarResNeXt, CIFAR, 100, "ResNeXt-29 4x32d, AugMix, CIFAR-100; normalises inside"),
        Entry("resnet50", normalized_resnet50, (64, 3, 224, 224), 1000, "ResNet-50, ImageNet; normalises inside"),
        _normalised(
            "deeplabv3plus_r50", DeepLabV3Plus, (2, 3, 1080, 1920), 19, "DeepLabV3+ ResNet-50, output stride 16"
        ),
        _normalised("segformer_b5", SegFormer, (1, 3, 540, 960), 19, "SegFormer-B5, logits at stride 4"),
        _normalised("segformer_b0", segformer_b0, (1, 3, 540, 960), 19, "SegFormer-B0, logits at stride 4"),
        Entry(
            "segformer_camvid",
            segformer_camvid,
            (1, 3, 240, 320),
            11,
            "SegFormer below B0's size, CamVid, logits at stride 4; normalises inside",
        ),
        _normalised("resnet20_cifar", partial(CifarResNet, depth=20), CIFAR, 10, "ResNet-20, CIFAR-10"),
        _normalised("resnet32_cifar", partial(CifarResNet, depth=32), CIFAR, 10, "ResNet-32, CIFAR-10"),
        _normalised("resnet56_cifar", partial(CifarResNet, depth=56), CIFAR, 10, "ResNet-56, CIFAR-10"),
        _normalised("vit_cifar", VisionTransformer, CIFAR, 10, "small vision transformer, CIFAR-10, no batch norm"),
    )
}


def names() -> list[str]:
    """The zoo's own names."""
    return list(ENTRIES)


def entry(name: str) -> Entry:
    """What the zoo knows about one of its own models."""
    if name not in ENTRIES:
        raise unknown(name, ENTRIES)
    return ENTRIES[name]


def create(name: str, **options: Any) -> nn.Module:
    """A model by name, with random weights; options go to its constructor.

    A zoo name, a timm name (`resnet18`, or `timm:resnet50` where the zoo has that name too), `tv:` and a torchvision
    name, or `hf:` and a Hugging Face model type.
    """
    if name in ENTRIES:
        return ENTRIES[name].build(**options)
    source, rest = _source(name)
    return SOURCES[source].create(rest, **options)


def input_shape(name: str) -> tuple[int, ...]:
    """The input a model is meant for: the paper's batch for the zoo's own, one sample for any other."""
    if name in ENTRIES:
        return ENTRIES[name].input_shape
    source, rest = _source(name)
    return SOURCES[source].input_shape(rest)


def _source(name: str) -> tuple[str, str]:
    """The package a name that is not the zoo's belongs to, and the name in there."""
    prefix, colon, rest = name.partition(":")
    if colon:
        if prefix not in SOURCES:
            raise ValueError(f"{name!r} must start with one of {', '.join(f'{known}:' for known in SOURCES)}")
        return prefix, rest
    try:
        timm = require("timm")
    except ImportError:
        raise unknown(name, ENTRIES, "; timm, which knows more, is missing: pip install timm") from None
    if not timm.is_model(name):
        raise unknown(name, [*ENTRIES, *timm.list_models()])
    return "timm", name
