import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from corruptions import corrupt
from stream_cases import acdc, camvid, cifar, picture, samples
from tta_domain import RAMP
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
        ({"corruptions": ["zzz"]}, "there are clean, fog, gaussian_noise, odd"),
        ({"corruptions": ["fog", "fog"]}, "must differ"),
        ({"severity": 6}, "severity must be 1 to 5, got 6"),
        ({"corruptions": ["odd"], "severity": 2}, "holds one severity alone"),
        ({"kind": "sorted"}, "stream must be one of continual, reset, gradual, mixed, correlated"),
        ({"kind": "mixed:2"}, "stream must be one of"),
        ({"kind": "correlated:x"}, "must be above 0"),
        ({"rounds": 0}, "rounds must be 1 or more"),
        ({"limit": 0}, "limit must be 1 or more"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        open_stream(cifar(tmp_path, names=("fog", "gaussian_noise", "clean", "odd")), **options)


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


def test_imagenet_labels_are_the_indices_of_the_synsets(tmp_path):
    """Whichever folders are there: a tabby cat is 281."""
    pytest.importorskip("timm")
    for rank, synset in enumerate(["n02123045", "n01440764", "n15075141"]):
        for i in range(2):
            size = (224, 224) if rank else (300, 400)
            picture(tmp_path / "fog" / "3" / synset / f"{i}.JPEG", size, (80 * rank,) * 3)
    stream = open_stream(tmp_path, severity=3)
    assert stream.kind == "imagenet"
    assert stream.classes == 1000
    ((x, y),) = stream.domains[0].batches(6)
    assert x.shape == (6, 3, 224, 224)
    grey = (255 * x[:, 0, 100, 100]).round()
    assert {(int(g), int(label)) for g, label in zip(grey, y, strict=True)} == {(0, 281), (80, 0), (160, 999)}
    assert next(iter(open_stream(tmp_path, severity=3, size=(32, 32)).domains[0].batches(6)))[0].shape[2:] == (32, 32)
    with pytest.raises(ValueError, match="has none of gaussian_noise"):
        open_stream(tmp_path, severity=4)
    (tmp_path / "snow" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no such image"):
        open_stream(tmp_path, severity=3)


def test_a_folder_per_class_of_any_image_format(tmp_path):
    for value, (name, file) in enumerate([("cat", "a.jpg"), ("dog", "b.JPEG"), ("eel", "c.png")]):
        picture(tmp_path / name / file, (40, 30), (60 * value,) * 3)
    (tmp_path / "eel" / "notes.txt").write_text("no image")
    stream = open_stream(tmp_path, corruptions=["clean", "contrast"], size=(16, 16))
    assert stream.classes == 3
    x, y = stream.domains[0].read([0, 1, 2])
    assert y.tolist() == [0, 1, 2]
    assert (255 * x[:, 0, 8, 8]).round().tolist() == [0, 60, 120]
    assert torch.equal(stream.domains[1].read([2])[0], corrupt(x[2:], "contrast", 5, [2]))
    pytest.importorskip("timm")
    for old, new in (("cat", "n02123045"), ("dog", "n01440764"), ("eel", "n02123046")):
        (tmp_path / old).rename(tmp_path / new)
    with pytest.raises(ValueError, match="'n02123046' is no synset of ImageNet's 1000 classes"):
        open_stream(tmp_path)
    (tmp_path / "n02123046").rename(tmp_path / "n01443537")
    labels = open_stream(tmp_path, corruptions=["clean"]).domains[0].read([0, 1, 2])[1]
    assert labels.tolist() == [0, 1, 281]


def test_synset_folders_without_timm(tmp_path, monkeypatch):
    picture(tmp_path / "n02123045" / "a.jpg", (16, 16), (9, 9, 9))
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(ImportError, match="pip install timm"):
        open_stream(tmp_path)


def test_synthetic_images_are_the_same_each_time():
    stream = open_stream("synthetic", corruptions=["clean", "fog"], size=(24, 32), limit=5, classes=10)
    (x, y), (again, _) = (stream.domains[0].read(stream.domains[0].numbers) for _ in range(2))
    assert x.shape == (5, 3, 24, 32)
    assert torch.equal(x, again)
    assert len(set(y.tolist())) > 1
    assert max(y) < 10
    assert 0 <= x.min() < x.max() <= 1


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
    with pytest.raises(ValueError, match="19 logits per pixel"):
        score.add(torch.zeros(1, 5, 1, 2), y)


def colorful(folder, count=12, classes=3):
    """One severity of two corruptions, and the clean images."""
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(("fog", "contrast", "clean")):
        images = np.random.default_rng(i).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        np.save(folder / f"{name}.npy", images)
    np.save(folder / "labels.npy", np.arange(count) % classes)
    return folder


def test_other_severities_are_made_of_clean_images(tmp_path):
    folder = colorful(tmp_path)
    (fog, contrast) = open_stream(folder, severity=3).domains
    clean = torch.from_numpy(np.load(folder / "clean.npy")).permute(0, 3, 1, 2).float() / 255
    for domain in (fog, contrast):
        x, y = domain.read([5, 2])
        assert torch.equal(x, corrupt(clean[[5, 2]], domain.name, 3, [5, 2]))
        assert y.tolist() == [2, 2]
    theirs = open_stream(folder).domains[0].read([0])[0]
    assert torch.equal(theirs[0], torch.from_numpy(np.load(folder / "fog.npy"))[0].permute(2, 0, 1).float() / 255)


def test_gradual_goes_up_and_down(tmp_path):
    folder = colorful(tmp_path)
    stream = open_stream(folder, kind="gradual", limit=4)
    assert [domain.name for domain in stream.domains] == ["fog", "contrast"]
    ramp = stream.domains[1]
    assert len(ramp) == 4 * 9
    found = [x for x, _ in ramp.batches(4, seed=1)]
    assert len(found) == 9
    for x, severity in zip(found, RAMP, strict=True):
        level = open_stream(folder, severity=severity, limit=4).domains[1]
        assert torch.equal(x, next(iter(level.batches(4, seed=1)))[0])
    assert torch.equal(found[1], found[7])
    assert not torch.equal(found[1], found[2])


def test_mixed_shuffles_all_domains_together(tmp_path):
    stream = open_stream(cifar(tmp_path, names=("fog", "snow")), kind="mixed")
    (domain,) = stream.domains
    assert (domain.name, len(domain)) == ("mixed", 20)
    first, again, other = (list(chain(*numbers_of(domain, 6, seed))) for seed in (0, 0, 1))
    assert first == again != other
    assert Counter(first) == dict.fromkeys(range(10), 2)


def test_correlated_sorts_by_class(tmp_path):
    folder = cifar(tmp_path, count=200, labels=np.random.default_rng(0).permutation(200) % 5)

    def runs(kind, seed=0):
        domain = open_stream(folder, kind=kind).domains[0]
        labels = torch.cat([y for _, y in domain.batches(64, seed)])
        assert Counter(labels.tolist()) == dict.fromkeys(range(5), 40)
        return int((labels.diff() != 0).sum()), labels

    mixed, sorted_some, sorted_all = (runs(kind)[0] for kind in ("continual", "correlated:100", "correlated:0.01"))
    assert mixed > 120
    assert sorted_some < 40  # five slots, five classes in each
    assert sorted_all <= sorted_some
    assert sorted_all < 15
    assert torch.equal(runs("correlated")[1], runs("correlated:0.1")[1])
    assert not torch.equal(runs("correlated")[1], runs("correlated", seed=1)[1])
    with pytest.raises(ValueError, match="sorts images by class, and those of 'fog' have none"):
        open_stream(acdc(tmp_path / "a"), kind="correlated")


def test_rounds_come_again_under_other_names(tmp_path):
    stream = open_stream(cifar(tmp_path), rounds=3)
    assert [domain.name for domain in stream.domains] == [
        *("gaussian_noise", "fog", "gaussian_noise@2", "fog@2", "gaussian_noise@3", "fog@3")
    ]
    assert numbers_of(stream.domains[0]) == numbers_of(stream.domains[4])


def test_imagenet_images_have_their_class_in_their_name(tmp_path):
    stream = open_stream(samples(tmp_path), size=(16, 16), corruptions=["clean", "contrast", "dark"], limit=3)
    assert (stream.kind, stream.classes) == ("imagenet", 1000)
    x, y = stream.domains[0].read([0, 2, 5])
    assert y.tolist() == [0, 14, 35]
    assert torch.equal(stream.domains[1].read([0, 2, 5])[0], corrupt(x, "contrast", 5, [0, 2, 5]))
    assert sorted(stream.domains[2].labels) == [0, 14, 28]
    assert [domain.name for domain in open_stream(tmp_path).domains] == list(CORRUPTIONS)
    assert open_stream(tmp_path, limit=1).domains[0].read([0])[0].shape == (1, 3, 224, 224)


def test_camvid_by_day_at_dusk_and_in_made_weather(tmp_path):
    stream = open_stream(camvid(tmp_path), size=(16, 24))
    assert stream.segmentation
    assert stream.classes == 11
    assert [domain.name for domain in stream.domains] == ["day", "dusk", "fog", "snow", "night"]
    day, dusk, fog = stream.domains[:3]
    assert len(day) == len(dusk) == 3
    x, y = day.read([0, 2])
    assert x.shape == (2, 3, 16, 24)
    assert y.shape == (2, 32, 48)
    assert set(y.unique().tolist()) == {3, 255}
    assert torch.equal(fog.read([0, 2])[0], corrupt(x, "fog", 5, [0, 2]))
    assert len(open_stream(tmp_path, split="val", corruptions=["motion_blur"]).domains) == 1
    with pytest.raises(ValueError, match="gradual stream changes the severity"):
        open_stream(tmp_path, kind="gradual")
    (tmp_path / "test/labels/0001TP_00001.png").unlink()
    with pytest.raises(ValueError, match=r"labels/\*.png of the same names"):
        open_stream(tmp_path)


@pytest.mark.skipif(not CORRUPTED.exists(), reason="the corrupted CIFAR-10 images are not beside the checkout")
def test_shift_on_real_corruptions():
    """In batches of 200, every change of look is told once, and nothing inside a corruption is."""
    shift, told = Shift(), {}
    for domain in open_stream(CORRUPTED).domains:
        told[domain.name] = [shift(x) for x, _ in domain.batches(200)]
    assert not any(any(batches[1:]) for batches in told.values())
    alike = {"shot_noise", "zoom_blur", "pixelate", "jpeg_compression"}  # each like the one before
    assert {name for name, batches in told.items() if not batches[0]} == alike
