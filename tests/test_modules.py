from collections import OrderedDict

import pytest
import torch
from torch import nn

import surgeon_fx
from surgeon_fx.modules import blocks, is_norm_layer, trains
from surgeon_fx.zoo.layers import ImageNormalizer


class Statistics(nn.BatchNorm2d):
    """A norm layer by what it is, not by its name."""


class ScaleNorm(nn.Module):
    """A norm layer of somebody else's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class PreNorm(nn.Module):
    """No norm layer: it holds one."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.SyncBatchNorm(4), True),
        (nn.InstanceNorm2d(4), True),
        (nn.LayerNorm(4, elementwise_affine=False), True),
        (nn.GroupNorm(2, 4), True),
        (nn.RMSNorm(4), True),
        (Statistics(4), True),
        (ScaleNorm(), True),
        (PreNorm(), False),
        (ImageNormalizer((0.5,) * 3, (0.5,) * 3), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_norm_layers(module, expected):
    assert is_norm_layer(module) == expected


def test_what_is_trained():
    model = nn.Sequential(PreNorm(), nn.BatchNorm1d(4))
    model[0].layer.requires_grad_(False)
    names = {
        which: [name for name, parameter in model.named_parameters() if trains(model, which)(name, parameter)]
        for which in (None, "all", "norm")
    }
    norms = ["0.norm.weight", "0.norm.bias", "1.weight", "1.bias"]
    assert names["norm"] == names[None] == norms
    assert len(names["all"]) == 6
    assert trains(model, lambda name, parameter: name == "1.bias")("1.bias", model[1].bias)
    with pytest.raises(ValueError, match="train must be 'all', 'norm' or a function"):
        trains(model, "most")


def test_blocks_of_a_wrapped_network():
    bare = surgeon_fx.zoo.create("resnet20_cifar")
    wrapped = nn.Sequential(OrderedDict(normalize=nn.Identity(), model=bare))
    assert list(blocks(wrapped)) == [f"model.{name}" for name in blocks(bare)]
    assert len(blocks(bare)) == 9
    assert len(blocks(surgeon_fx.zoo.create("resnet50"))) == 16
