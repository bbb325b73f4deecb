from pathlib import Path

import pytest
import torch
from zoo_cases import SMALL_OPTIONS, on_meta

from surgeon_fx import zoo

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


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
