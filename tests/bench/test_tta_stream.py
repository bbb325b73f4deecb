from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import acdc, cifar, picture
from tta_score import Score
from tta_stream import CORRUPTIONS, open_stream

from surgeon_fx.adapt.shift import Shift

CORRUPTED = Path(__file__).parents[3] / "shared" / "data" / "cifar10c"


def numbers_of(domain, batch=4, seed=0):
    return [(255 * x[:, 0, 0, 0]).round().int().tolist() for x, _ in domain.batches(batch, seed)]


def test_standard_corruptions_come_in_standard_order_and_others_by_name(tmp_path):
    stream = open_stream(cifar(tmp_path))
    assert stream.kind == "cifar"
    assert stream.classes == 7
    assert [domain.name for domain in stream.domains] == ["gaussian_noise", "fog"]
    assert [domain.name for domain in open_stream(tmp_path, ["clean", "fog"]).domains] == ["clean", "fog"]
    assert len(CORRUPTIONS) == 15


def test_batches_are_pixels_in_order_of_the_seed_and_the_last_is_short(tmp_path):
    first, second = open_stream(cifar(tmp_path)).domains
    x, y = next(iter(first.batches(4)))
    assert x.shape == (4, 3, 8, 8)
    assert x.dtype == torch.float32
    assert x.max() <= 9 / 255
    assert (y == (255 * x[:, 0, 0, 0]).round().long() % 7).all()
    batches = numbers_of(first)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(chain(*batches)) == list(range(10))
    assert batches == numbers_of(first)
    assert batches != numbers_of(first, seed=1)
    assert batches != numbers_of(second)


def test_severity_picks_a_fifth_of_the_standard_files(tmp_path):
    folder = cifar(tmp_path, count=10, severities=5)
    for severity in (1, 3, 5):
        (domain, _) = open_stream(folder, severity=severity).domains
        assert sorted(chain(*numbers_of(domain))) == list(range(10 * severity - 10, 10 * severity))
    np.save(folder / "labels.npy", np.arange(10) % 7)  # some keep the labels of one severity alone
    x, y = next(iter(open_stream(folder, severity=2).domains[0].batches(10)))
    assert ((255 * x[:, 0, 0, 0]).round().long() % 10 % 7 == y).all()


def test_a_limit_is_spread_over_the_images(tmp_path):
    (domain, _) = open_stream(cifar(tmp_path), limit=5).domains
    assert sorted(chain(*numbers_of(domain))) == [0, 2, 4, 6, 8]
    assert len(open_stream(tmp_path, limit=99).domains[0]) == 10


def test_random_order_is_drawn_from_the_seed(tmp_path):
    stream = open_stream(cifar(tmp_path, names=CORRUPTIONS))
    orders = [[domain.name for domain in stream.reordered("random", seed).domains] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == sorted(CORRUPTIONS)
    assert stream.reordered("given", 1) is stream
    with pytest.raises(ValueError, match="order must be"):
        stream.reordered("sorted", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": ["gausian_noise"]}, "did you mean gaussian_noise"),
        ({"corruptions": ["zzz"]}, "there are clean, fog, gaussian_noise"),
        ({"corruptions": ["fog", "fog"]}, "must differ"),
        ({"severity": 6}, "severity must be 1 to 5, got 6"),
        ({"severity": 2}, "holds one severity alone"),
        ({"limit": 0}, "limit must be 1 or more"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        open_stream(cifar(tmp_path), **options)


def test_folders_and_files_that_are_not_what_they_should_be(tmp_path):
    with pytest.raises(ValueError, match="data must be a folder"):
        open_stream(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="none of the known layouts"):
        open_stream(tmp_path)
    folder = cifar(tmp_path / "c")
    np.save(folder / "fog.npy", np.zeros((10, 8, 8, 3)))
    with pytest.raises(ValueError, match=r"fog.npy must hold uint8 images .* got float64"):
        open_stream(folder)
    np.save(folder / "fog.npy", np.zeros((10, 3, 8, 8), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"of shape \(10, 3, 8, 8\)"):
        open_stream(folder)
    np.save(folder / "fog.npy", np.zeros((9, 8, 8, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="has 9 images, and labels.npy 10 labels"):
        open_stream(folder)
    np.save(folder / "labels.npy", np.zeros((10, 2)))
    with pytest.raises(ValueError, match="row of integers"):
        open_stream(folder)
    with pytest.raises(ValueError, match="name the corruptions to take"):
        open_stream(cifar(tmp_path / "d", names=["clean"]))
    domain = open_stream(cifar(tmp_path / "e")).domains[0]
    with pytest.raises(ValueError, match="batch must be 1 or more"):
        next(domain.batches(0))
    with pytest.raises(ValueError, match="seed must not be negative"):
        next(domain.batches(1, seed=-1))


def test_imagenet_labels_are_ranks_of_the_synsets(tmp_path):
    for rank, synset in enumerate(["n02", "n01", "n10"]):
        for i in range(2):
            size = (224, 224) if rank else (300, 400)
            picture(tmp_path / "fog" / "3" / synset / f"{i}.JPEG", size, (80 * rank,) * 3)
    stream = open_stream(tmp_path, severity=3)
    assert stream.kind == "imagenet"
    assert stream.classes == 3
    ((x, y),) = stream.domains[0].batches(6)
    assert x.shape == (6, 3, 224, 224)
    grey = (255 * x[:, 0, 100, 100]).round()
    assert {(int(g), int(label)) for g, label in zip(grey, y, strict=True)} == {(0, 1), (80, 0), (160, 2)}
    assert next(iter(open_stream(tmp_path, severity=3, size=(32, 32)).domains[0].batches(6)))[0].shape[2:] == (32, 32)
    with pytest.raises(ValueError, match="has none of gaussian_noise"):
        open_stream(tmp_path, severity=4)
    (tmp_path / "snow" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no such image"):
        open_stream(tmp_path, severity=3)


def test_acdc_keeps_its_order_and_its_labels_their_size(tmp_path):
    stream = open_stream(acdc(tmp_path), size=(16, 24))
    assert stream.segmentation
    assert [domain.name for domain in stream.domains] == ["fog", "snow"]
    (x, y), (x_last, _) = stream.domains[0].batches(2, seed=3)
    assert x.shape == (2, 3, 16, 24)
    assert (255 * x[:, 0, 0, 0]).round().tolist() == [0, 50]
    assert (255 * x_last[:, 0, 0, 0]).round().tolist() == [100]
    assert y.shape == (2, 32, 48)
    assert y[:, 0, 0].tolist() == [0, 1]
    assert next(iter(open_stream(tmp_path).domains[0].batches(1)))[0].shape == (1, 3, 540, 960)
    with pytest.raises(ValueError, match="has none of fog, night, rain, snow"):
        open_stream(tmp_path, split="val")
    (tmp_path / "gt/fog/train/GP01/GP01_frame_000001_gt_labelTrainIds.png").unlink()
    with pytest.raises(ValueError, match="1 of 3 images have no label"):
        open_stream(tmp_path)


def test_the_error_of_images_is_over_all_batches():
    score = Score(3, segmentation=False)
    assert score.add(torch.eye(3), torch.tensor([0, 1, 0])) == pytest.approx(100 / 3)
    assert score.add(torch.eye(3)[:1], torch.tensor([0])) == 0
    assert score.error == 25
    with pytest.raises(ValueError, match="tells 2 classes apart, and labels have 3"):
        score.add(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match="one row of logits an image"):
        score.add(torch.zeros(1, 3, 2), torch.tensor([0]))


def test_the_error_of_pixels_is_one_minus_miou():
    score = Score(19, segmentation=True)
    y = torch.tensor([[[0, 0, 1, 1], [0, 0, 255, 1]]])
    logits = torch.zeros(1, 19, 1, 2)
    logits[0, 0, 0, 0] = logits[0, 1, 0, 1] = 1  # at half the size of the labels
    assert score.add(logits, y) == pytest.approx(0)
    logits[0, 0, 0, 1] = 2  # class 0 everywhere: its IoU is 4 / 7, that of class 1 is 0
    assert score.add(logits, y) == pytest.approx(100 * (1 - 2 / 7), abs=1e-4)
    assert score.error == pytest.approx(100 * (1 - (8 / 11 + 3 / 6) / 2), abs=1e-4)
    assert Score(19, segmentation=True).add(logits, torch.full((1, 2, 4), 255)) == 0
    with pytest.raises(ValueError, match="19 logits a pixel"):
        score.add(torch.zeros(1, 5, 1, 2), y)


@pytest.mark.skipif(not CORRUPTED.exists(), reason="the corrupted CIFAR-10 images are not beside the checkout")
def test_shift_on_real_corruptions():
    """In batches of 200, every change of look is told once, and nothing inside a corruption is."""
    shift, told = Shift(), {}
    for domain in open_stream(CORRUPTED).domains:
        told[domain.name] = [shift(x) for x, _ in domain.batches(200)]
    assert not any(any(batches[1:]) for batches in told.values())
    alike = {"shot_noise", "zoom_blur", "pixelate", "jpeg_compression"}  # each like the one before
    assert {name for name, batches in told.items() if not batches[0]} == alike
