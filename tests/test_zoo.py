import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from surgeon_fx import zoo
from surgeon_fx.zoo import external
from surgeon_fx.zoo.layers import DropPath

MIB = 2**20
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
KINDS = {"norm": (_BatchNorm, nn.LayerNorm), "conv": nn.Conv2d, "linear": nn.Linear}
SMALL_OPTIONS = {
    "wrn28_10": {"depth": 10, "width": 1},
    "resnext29": {"depth": 11},
    "resnet50": {"blocks": (1, 1, 1, 1)},
    "deeplabv3plus_r50": {"blocks": (1, 1, 1, 1)},
    "segformer_b5": {"depths": (1, 1, 1, 1), "dims": (8, 16, 40, 64), "head_dim": 16},
}
SMALL = ("wrn16_1", "resnet20_cifar", "vit_cifar", "segformer_b0")


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.create(name, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


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
    size = {"deeplabv3plus_r50": (84, 68), "segformer_b5": (21, 17), "segformer_b0": (21, 17)}.get(name, ())
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


@pytest.mark.parametrize("depth", [20, 32, 56])
def test_cifar_weights_load_strictly_and_classify(depth):
    numpy, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.torch")
    weights = DATA / "weights" / f"cifar10_resnet{depth}.safetensors"
    if not weights.exists() or not (DATA / "cifar10c" / "clean.npy").exists():
        pytest.skip("the CIFAR-10 weights and images are not next to this repository")
    model = zoo.create(f"resnet{depth}_cifar")
    model.load_state_dict(safetensors.load_file(weights), strict=True)
    loaded = zoo.load(f"resnet{depth}_cifar", weights)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    entry = zoo.entry(f"resnet{depth}_cifar")
    images = torch.from_numpy(numpy.load(DATA / "cifar10c" / "clean.npy")[:200]).permute(0, 3, 1, 2) / 255
    labels = torch.from_numpy(numpy.load(DATA / "cifar10c" / "labels.npy")[:200])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (entry.mean, entry.std))
    with torch.no_grad():
        right = loaded.eval()((images - mean) / std).argmax(1) == labels
    assert right.float().mean() > 0.78  # 81 to 84 % measured: the images have been through JPEG, quality 75


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


def blank(name, **options):
    """A small version of a model, and a state dict for it that tells every tensor from the others."""
    model = on_meta(name, **SMALL_OPTIONS[name], **options).to_empty(device="cpu")
    for value in model.state_dict().values():
        value.zero_()
    return model, {k: torch.full_like(v, i + 1) for i, (k, v) in enumerate(model.state_dict().items())}


def wrapped(state, how):
    """The state dict as a public file holds it: behind a wrapper's prefix, under a key, or with its own constants."""
    if how == "bare network behind DataParallel":
        inner = {k.removeprefix("model."): v for k, v in state.items() if not k.startswith("normalize.")}
        return {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in inner.items()}}
    if how == "numbered normaliser":
        names = {k: f"0.{k.rpartition('.')[2]}" for k in state if k in ("mu", "sigma") or k.startswith("normalize.")}
        return {names.get(k, f"1.{k.removeprefix('model.')}"): v for k, v in state.items()}
    return {"model": {f"{how}{k}": v for k, v in state.items()}}


@pytest.mark.parametrize("how", ["", "module.", "model.", "bare network behind DataParallel", "numbered normaliser"])
@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_checkpoints_load_through_their_wrappers(name, how):
    model, state = blank(name)
    assert zoo.load(model, wrapped(state, how)) is model
    if how == "bare network behind DataParallel" and name == "resnet50":  # the file has no constants, the model's stay
        state |= {f"normalize.{k}": torch.zeros(1, 3, 1, 1) for k in ("mean", "std")}
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_normalisation_comes_from_the_file_where_it_has_one():
    model = zoo.create("resnext29", **SMALL_OPTIONS["resnext29"])
    state = model.state_dict()
    without = {k: v for k, v in state.items() if k not in ("mu", "sigma")}
    assert torch.equal(zoo.load(model, without).mu, torch.full((1, 3, 1, 1), 0.5))
    zoo.load(model, {**without, "mean": torch.tensor([0.1, 0.2, 0.3])})
    assert model.mu.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    plain = zoo.create("wrn16_1")
    with pytest.raises(ValueError, match="1 unexpected .mean."):
        zoo.load(plain, {**plain.state_dict(), "mu": torch.zeros(3)})


def test_auxiliary_head_in_the_file_may_be_left_there():
    full, state = blank("deeplabv3plus_r50", aux=True)
    lean, _ = blank("deeplabv3plus_r50")
    zoo.load(lean, {f"module.{k}": v for k, v in state.items()})
    assert all(torch.equal(v, state[k]) for k, v in lean.state_dict().items())
    with pytest.raises(ValueError, match=r"missing \(dsn.0.weight, dsn.0.bias, dsn.1.weight, ...\)"):
        zoo.load(full, lean.state_dict())


def test_checkpoint_that_does_not_fit_says_why(tmp_path):
    model = zoo.create("wrn16_1")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = {**before, "fc.weight": torch.zeros(100, 64), "extra": torch.zeros(1)}
    del state["conv1.weight"]
    with pytest.raises(ValueError, match="WideResNet: 1 missing .conv1.weight.; 1 unexpected .extra.; 1 of another"):
        zoo.load(model, state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="two tensors for conv1.weight"):
        zoo.load(model, {**before, "module.conv1.weight": before["conv1.weight"]})
    for empty in ({}, {"epoch": 1}, {"state_dict": {"a": 1}}):
        with pytest.raises(ValueError, match="holds no state dict"):
            zoo.load(model, empty)
    page = tmp_path / "Standard.pt"
    page.write_text("<html>quota exceeded</html>")
    with pytest.raises(ValueError, match="Standard.pt is no checkpoint"):
        zoo.load(model, page)


def test_file_formats(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    source = zoo.create("wrn16_1")
    torch.save({"state_dict": source.state_dict()}, tmp_path / "a.pt")
    safetensors.save_file(source.state_dict(), tmp_path / "a.safetensors")
    for path in (tmp_path / "a.pt", str(tmp_path / "a.safetensors")):
        assert torch.equal(zoo.load("wrn16_1", path).fc.weight, source.fc.weight)


def test_entries():
    assert zoo.names()[0] == "wrn28_10"
    entry = zoo.entry("segformer_b5")
    assert (entry.name, entry.classes, entry.input_shape) == ("segformer_b5", 19, (1, 3, 540, 960))
    assert entry.mean == (0.485, 0.456, 0.406)
    assert zoo.entry("wrn28_10").mean is None
    with pytest.raises(ValueError, match="no model is called 'wrn28-10'; did you mean wrn28_10"):
        zoo.entry("wrn28-10")


def test_timm_names():
    pytest.importorskip("timm")
    with torch.device("meta"):
        assert parameters(zoo.create("resnet18", num_classes=7)) == 11_180_103
        assert parameters(zoo.create("timm:resnet50")) == 25_557_032
    assert zoo.input_shape("resnet18") == (1, 3, 224, 224)
    assert zoo.input_shape("timm:inception_v3") == (1, 3, 299, 299)


def test_torchvision_names():
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        assert parameters(zoo.create("tv:resnet50")) == 25_557_032
        assert parameters(zoo.create("tv:fcn_resnet50", num_classes=19)) > 30_000_000
        zoo.create("tv:inception_v3")
    assert zoo.input_shape("tv:inception_v3") == (1, 3, 299, 299)
    assert zoo.input_shape("tv:resnet50") == (1, 3, 224, 224)
    assert zoo.input_shape("tv:r3d_18") == (1, 3, 16, 112, 112)


def test_hugging_face_names():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        assert type(zoo.create("hf:segformer", depths=[1, 1, 1, 1])).__name__ == "SegformerForSemanticSegmentation"
        assert type(zoo.create("hf:vit", num_hidden_layers=1)).__name__ == "ViTForImageClassification"
        bare = zoo.create("hf:segformer", task="ImageClassification")
    assert type(bare).__name__ == "SegformerForImageClassification"
    assert zoo.input_shape("hf:vit") == (1, 3, 224, 224)
    with pytest.raises(ValueError, match="no image size"):
        zoo.input_shape("hf:gpt2")


def test_unknown_names_suggest_the_nearest():
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="no model is called 'wrn28_11'; did you mean wrn28_10"):
        zoo.create("wrn28_11")
    with pytest.raises(ValueError, match="did you mean .*resnet18"):
        zoo.create("resnet1_8")
    with pytest.raises(ValueError, match="did you mean .*resnet50"):
        zoo.input_shape("timm:resnet_50")
    with pytest.raises(ValueError, match="must start with one of timm:, tv:, hf:"):
        zoo.create("jax:resnet50")


@pytest.mark.parametrize(("prefix", "module"), [("tv:", "torchvision"), ("hf:", "transformers")])
def test_unknown_names_of_other_packages(prefix, module):
    pytest.importorskip(module)
    with pytest.raises(ValueError, match="no model is called 'resnet_5'; did you mean"):
        zoo.create(f"{prefix}resnet_5")


def test_missing_package_is_named(monkeypatch):
    def missing(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(external.importlib, "import_module", missing)
    for name, package in {"timm:resnet18": "timm", "tv:resnet18": "torchvision", "hf:vit": "transformers"}.items():
        with pytest.raises(ImportError, match=f"pip install {package}"):
            zoo.create(name)
    with pytest.raises(ValueError, match="no model is called 'resnet18'.*pip install timm"):
        zoo.create("resnet18")


def test_import_brings_no_other_package_in():
    heavy = "{'timm', 'torchvision', 'transformers', 'safetensors'}"
    code = f"import sys, surgeon_fx.zoo as z; z.create('vit_cifar'); print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
