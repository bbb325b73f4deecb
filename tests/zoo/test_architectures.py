from collections import Counter
from functools import cache

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from zoo_cases import SMALL_OPTIONS, on_meta, parameters

from surgeon_fx import zoo
from surgeon_fx.zoo.layers import DropPath

MIB = 2**20
KINDS = {"norm": (_BatchNorm, nn.LayerNorm), "conv": nn.Conv2d, "linear": nn.Linear}
SMALL = ("wrn16_1", "resnet20_cifar", "vit_cifar", "segformer_b0", "segformer_camvid")


@cache
def elements(name, shape):
    """Elements at the inputs of the layers of each kind, and the largest input or output of any of them."""
    model, found = on_meta(name), Counter()

    def count(kind, x, out):
        found[kind] += x.numel()
        found["largest"] = max(found["largest"], x.numel(), out.numel())

    for module in model.modules():
        for kind, types in KINDS.items():
            if isinstance(module, types):
                module.register_forward_hook(lambda _, args, out, kind=kind: count(kind, args[0], out))
    model(torch.empty(shape, device="meta"))
    return found


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("wrn28_10", {}, 36_479_194),
        ("resnext29", {}, 6_900_132),
        ("resnet50", {}, 25_557_032),
        ("deeplabv3plus_r50", {}, 40_351_667),
        ("deeplabv3plus_r50", {"aux": True}, 45_081_542),
        ("segformer_b5", {}, 84_610_406),
        ("resnet20_cifar", {}, 269_722),
    ],
)
def test_parameter_counts(name, options, expected):
    assert parameters(on_meta(name, **options)) == expected


def test_parts_of_segformer_b5_and_vit_size():
    model = on_meta("segformer_b5")
    assert parameters(model.backbone) == 81_443_008
    assert parameters(model.decode_head) - parameters(model.decode_head.conv_seg) == 3_164_947
    norms = [m for m in model.modules() if isinstance(m, KINDS["norm"])]
    assert len(norms) == 162
    assert sum(map(parameters, norms)) == 94_336
    vit = on_meta("vit_cifar")
    assert 450_000 < parameters(vit) < 550_000
    assert not any(isinstance(m, _BatchNorm) for m in vit.modules())


@pytest.mark.parametrize(
    ("name", "norms", "convs", "affine"),
    [("wrn28_10", 25, 28, 17_952), ("resnext29", 31, 31, 25_216), ("resnet50", 53, 53, 53_120)],
)
def test_layer_counts(name, norms, convs, affine):
    found = [m for m in on_meta(name).modules() if isinstance(m, _BatchNorm)]
    assert len(found) == norms
    assert sum(map(parameters, found)) == affine
    assert sum(isinstance(m, nn.Conv2d) for m in on_meta(name).modules()) == convs


@pytest.mark.parametrize(
    ("name", "norm", "conv", "linear"),
    [
        ("wrn28_10", 2_310_144, 2_534_400, 640),
        ("resnext29", 3_571_712, 3_509_248, 1_024),
        ("resnet50", 11_113_984, 10_662_400, 2_048),
    ],
)
def test_elements_per_sample(name, norm, conv, linear):
    batch, *_ = shape = zoo.input_shape(name)
    found = elements(name, shape)
    assert [found[kind] for kind in KINDS] == [batch * norm, batch * conv, batch * linear]


@pytest.mark.parametrize(
    ("name", "shape", "norm", "total", "largest"),
    [
        ("wrn28_10", (200, 3, 32, 32), 1762.5, 3696.6, 125.0),
        ("resnext29", (200, 3, 32, 32), 2725.0, 5403.1, 200.0),
        ("resnet50", (64, 3, 224, 224), 2713.4, 5317.0, 196.0),
        ("deeplabv3plus_r50", (2, 3, 1080, 1920), 4645.7, 9973.5, 300.6),
        ("segformer_b5", (1, 3, 540, 960), 452.9, 2792.8, 379.7),
    ],
)
def test_static_cache_figures_of_the_paper(name, shape, norm, total, largest):
    assert zoo.input_shape(name) == shape
    found = elements(name, shape)
    counts = found["norm"], sum(found[kind] for kind in KINDS), found["largest"]
    assert [4 * count / MIB for count in counts] == pytest.approx([norm, total, largest], abs=0.1)


def test_segformer_b5_by_kind():
    mib = {kind: 4 * count / MIB for kind, count in elements("segformer_b5", (1, 3, 540, 960)).items()}
    assert mib["conv"] == pytest.approx(1243, abs=1)
    assert mib["linear"] == pytest.approx(1097, abs=1)


@pytest.mark.parametrize("name", zoo.names())
def test_any_size_under_fake_tensors(name):
    classes = zoo.entry(name).classes
    with FakeTensorMode():
        out = zoo.create(name, **SMALL_OPTIONS.get(name, {})).train()(torch.empty(3, 3, 84, 68))
    size = (84, 68) if name == "deeplabv3plus_r50" else (21, 17) if name.startswith("segformer") else ()
    assert out.shape == (3, classes, *size)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return True


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", zoo.names())
def test_every_container_traces_with_its_children_as_leaves(name, train):
    model = on_meta(name).train(train)
    containers = {type(m): m for m in model.modules() if not type(m).forward.__module__.startswith("torch.nn")}
    assert containers
    for module in containers.values():
        fx.GraphModule(module, Leaves().trace(module))


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_reach_every_parameter(name):
    torch.manual_seed(0)
    model = zoo.create(name)
    model(torch.rand(2, 3, 32, 32)).square().mean().backward()
    unused = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert not {n for n in unused if "conv_seg" not in n}


def test_wide_block_activates_what_its_shortcut_reads():
    block = zoo.create("wrn16_1", width=2).block1.layer[0].eval()
    x = torch.randn(2, 16, 8, 8)
    active = torch.relu(block.bn1(x))
    expected = block.convShortcut(active) + block.conv2(torch.relu(block.bn2(block.conv1(active))))
    assert torch.allclose(block(x.clone()), expected, atol=1e-6)


def test_cifar_shortcut_drops_pixels_and_pads_channels_on_both_sides():
    block = zoo.create("resnet20_cifar").layer2[0].eval()
    x, shortcut = torch.randn(2, 16, 8, 8), torch.zeros(2, 32, 4, 4)
    shortcut[:, 8:24] = x[:, :, ::2, ::2]
    branch = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    assert torch.equal(block(x), torch.relu(branch + shortcut))


def test_segformer_attention_equals_the_written_out_form():
    torch.manual_seed(0)
    attention = zoo.create("segformer_b0").backbone.block2[0].attn
    x = torch.randn(2, 8, 12, 64)
    small = attention.norm(attention.sr(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
    k, v = attention.kv(small).reshape(2, 6, 2, 2, 32).permute(2, 0, 3, 1, 4)
    q = attention.q(x).reshape(2, 96, 2, 32).transpose(1, 2)
    mixed = (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1) @ v
    assert torch.allclose(attention(x), attention.proj(mixed.transpose(1, 2).reshape(x.shape)), atol=1e-6)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 1, 2, 2)
    out = layer(x)
    assert out.flatten(1).std(1).max() == 0
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert out.mean() == pytest.approx(1, abs=0.05)
    assert layer.eval()(x) is x
    rates = [m.rate for m in on_meta("segformer_b5").modules() if isinstance(m, DropPath)]
    assert len(rates) == 51
    assert rates[-1] == pytest.approx(0.1)


def test_bad_depth_is_refused():
    for name in ("wrn28_10", "resnext29", "resnet20_cifar"):
        with pytest.raises(ValueError, match="depth must be"):
            zoo.create(name, depth=27)


PUBLIC_KEYS = {
    "wrn28_10": "conv1.weight block1.layer.0.bn1.weight block1.layer.0.convShortcut.weight bn1.running_mean fc.bias",
    "resnext29": "conv_1_3x3.weight bn_1.weight stage_1.0.conv_reduce.weight stage_1.0.bn_reduce.bias "
    "stage_2.0.conv_conv.weight stage_2.0.bn.weight stage_3.2.conv_expand.weight stage_3.2.bn_expand.weight "
    "stage_1.0.downsample.0.weight stage_1.0.downsample.1.weight classifier.bias mu sigma",
    "resnet50": "model.conv1.weight model.layer1.0.conv3.weight model.layer4.0.downsample.1.bias model.fc.weight",
    "deeplabv3plus_r50": "layer0.0.weight layer0.1.weight layer4.2.conv2.weight layer1.0.downsample.0.weight "
    "aspp.features.3.0.weight aspp.features.0.1.bias aspp.img_conv.0.weight bot_aspp.1.weight bot_fine.0.weight "
    "final1.3.weight final1.4.weight final2.0.bias dsn.0.bias dsn.1.weight dsn.4.weight",
    "segformer_b5": "backbone.patch_embed1.proj.weight backbone.patch_embed4.norm.bias backbone.block1.0.attn.q.weight "
    "backbone.block3.39.attn.kv.bias backbone.block1.2.attn.sr.weight backbone.block1.2.attn.norm.weight "
    "backbone.block4.0.attn.proj.weight backbone.block2.5.mlp.dwconv.dwconv.weight backbone.block1.0.mlp.fc1.weight "
    "backbone.block1.0.norm2.weight backbone.norm4.weight decode_head.linear_c4.proj.weight "
    "decode_head.linear_fuse.conv.weight decode_head.linear_fuse.bn.weight decode_head.linear_pred.bias "
    "decode_head.conv_seg.weight",
}


@pytest.mark.parametrize("name", PUBLIC_KEYS)
def test_layers_carry_the_public_names(name):
    options = {"aux": True} if name == "deeplabv3plus_r50" else {}
    assert set(PUBLIC_KEYS[name].split()) <= set(on_meta(name, **options).state_dict())
