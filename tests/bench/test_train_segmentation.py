"""The training of the small SegFormer, at a size that takes a second; and the weights it wrote."""

import itertools
from pathlib import Path

import pytest
import torch
import train_segmentation
from stream_cases import camvid
from train_segmentation import Images, augment, class_weights, main, miou, rate_at

from surgeon_fx import adapt, zoo

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "camvid"
WEIGHTS = ROOT / "bench" / "weights" / "segformer_camvid.safetensors"
SMALL = ["--size", "32x48", "--crop", "32x32", "--batch", "2", "--every", "1", "--threads", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    camvid(tmp_path / "camvid", count=2)
    small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "heads": (1, 1, 1, 1), "head_dim": 8}
    create, load = zoo.create, zoo.load
    monkeypatch.setattr(train_segmentation.zoo, "create", lambda name: create(name, **small))
    monkeypatch.setattr(train_segmentation.zoo, "load", lambda name, path: load(create(name, **small), path))
    return tmp_path


def train(*more):
    return main(["--data", "camvid", *SMALL, "--checkpoint", "state.pt", "--out", "w.safetensors", *more])


def test_trains_within_its_time_and_writes_half_precision(folder, capsys):
    assert train("--minutes", "0.03", "--lr", "3e-3") == 0
    out = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in out.splitlines() if "loss" in line]
    assert len(losses) > 3
    assert losses[-1] < losses[0]
    assert "wrote w.safetensors" in out
    model = train_segmentation.zoo.load("segformer_camvid", "w.safetensors")
    assert adapt.Surgeon(model)(torch.rand(1, 3, 32, 48)).shape == (1, 11, 8, 12)
    state = torch.load("state.pt", weights_only=True)
    assert 0.03 * 60 <= state["seconds"] < 0.03 * 60 + 5


def test_scores_a_file_without_training(folder, capsys):
    assert train("--minutes", "0.005") == 0
    written = capsys.readouterr().out.split("written weights ")[1].split()[0]
    Path("state.pt").unlink()
    assert train("--score", "w.safetensors") == 0
    assert f"val mIoU of w.safetensors {written} %" in capsys.readouterr().out
    assert not Path("state.pt").exists()


def test_goes_on_from_its_checkpoint(folder, capsys):
    assert train("--minutes", "0.005") == 0
    first = torch.load("state.pt", weights_only=True)
    assert train("--minutes", "0.01", "--resume") == 0
    assert f"goes on after epoch {first['epoch']}" in capsys.readouterr().out
    second = torch.load("state.pt", weights_only=True)
    assert second["epoch"] > first["epoch"]
    assert second["seconds"] > first["seconds"]
    assert train("--minutes", "0.005") == 0  # without the option it starts anew
    assert torch.load("state.pt", weights_only=True)["epoch"] < second["epoch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "folder of CamVid"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--crop", "64x64"], "--crop must not be larger"),
        (["--batch", "100"], "--batch must not be above the number of images, 4"),
    ],
)
def test_what_makes_no_sense(folder, capsys, arguments, message):
    assert train(*arguments) == 2
    assert message in capsys.readouterr().err


def test_augmentation_moves_pixels_and_labels_together():
    y = torch.arange(48, dtype=torch.uint8).view(6, 8) % 11
    y = y.repeat_interleave(8, 0).repeat_interleave(8, 1)
    x = (y * 12 + 40).expand(3, -1, -1)
    random = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(8):
        image, label = augment(x, y, (40, 40), random)
        assert image.shape == (3, 40, 40)
        assert label.shape == (40, 40)
        assert 0 <= image.min() <= image.max() <= 1
        inside = label != 255
        seen.add(bool(inside.all()))
        values = [image[0][(label == c) & inside].median() for c in label[inside].unique()]
        assert all(a < b for a, b in itertools.pairwise(values))  # brighter is a higher class, as before
    assert seen == {True, False}


def test_rare_classes_weigh_more_and_the_rate_rises_and_falls():
    labels = torch.tensor([0] * 90 + [1] * 10 + [255] * 50)
    weights = class_weights(labels)
    assert weights[0] < weights[1] < weights[2]
    assert weights.mean().item() == pytest.approx(1)
    rates = [rate_at(share) for share in (0, 0.025, 0.05, 0.5, 1.0, 1.2)]
    assert rates[0] < rates[1] < rates[2] == 1 > rates[3] > rates[4] == rates[5] == 0


def test_miou_is_at_the_labels_own_size(folder):
    images = Images.read(Path("camvid"), "val", (16, 24), None)
    assert images.x.shape == (4, 3, 16, 24)
    assert images.y.shape == (4, 16, 24)
    assert images.whole.shape == (4, 32, 48)

    class Road(torch.nn.Module):
        def forward(self, x):
            logits = torch.zeros(len(x), 11, 4, 6)
            logits[:, 3] = 1
            return logits

    assert miou(Road(), images) == pytest.approx(100)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/data beside the repository: CamVid")
def test_real_scenes_are_read():
    images = Images.read(REAL, "val", (60, 80), 3)
    assert images.whole.shape == (3, 360, 480)
    assert set(images.whole.unique().tolist()) <= {*range(11), 255}


@pytest.mark.skipif(not (REAL.is_dir() and WEIGHTS.exists()), reason="needs CamVid and weights that have been trained")
def test_the_weights_in_the_repository_know_the_road():
    assert WEIGHTS.stat().st_size < 8e6
    model = zoo.load("segformer_camvid", WEIGHTS)
    assert miou(model, Images.read(REAL, "val", (240, 320), 10)) > 45
