"""Corruptions: deterministic, in range, stronger with severity, and like the published CIFAR-10-C."""

import itertools
from pathlib import Path

import corruptions
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corruptions import CONSTANTS, CORRUPTIONS, corrupt
from tta_stream import CORRUPTIONS as STANDARD

REAL = Path(__file__).parents[3] / "shared" / "data" / "cifar10c"
# Published constants of these trade one kind of harm for another, so the distance from the image need not grow.
NOT_MONOTONE = {"glass_blur", "elastic_transform", "frost"}


def pictures(height, width, count=3):
    """Smooth color, lines and texture."""
    generator = torch.Generator().manual_seed(0)
    smooth = F.interpolate(torch.rand(count, 3, 5, 5, generator=generator), size=(height, width), mode="bilinear")
    texture = torch.rand(count, 1, height // 2, width // 2, generator=generator)
    texture = F.interpolate(texture, size=(height, width), mode="bilinear")
    return (0.7 * smooth + 0.3 * texture).clamp(0, 1)


def distance(a, b):
    return (a - b).square().mean().sqrt().item()


def test_every_corruption_of_the_standard_and_darkness():
    assert set(CORRUPTIONS) == {*STANDARD, "dark", "night"}
    assert all(len(one) == 5 for pair in CONSTANTS.values() for one in pair)
    assert CONSTANTS.keys() == CORRUPTIONS.keys()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_shape_type_range_and_seed(name):
    for size in ((32, 32), (33, 70), (96, 72)):
        x = pictures(*size)
        before = x.clone()
        made = corrupt(x, name, 5, [3, 4, 5])
        assert made.shape == x.shape
        assert made.dtype == x.dtype
        assert made.min() >= 0
        assert made.max() <= 1
        assert torch.equal(x, before)
        assert distance(made, x) > 0.01
        assert torch.equal(made, corrupt(x, name, 5, 3))  # successive seeds
        assert torch.equal(made[1:2], corrupt(x[1:2], name, 5, [4]))  # whatever the batch
    assert corrupt(x.double(), name, 1).dtype == torch.float64
    assert corrupt(x[:0], name, 1).shape == (0, 3, 96, 72)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_random_ones_differ_by_seed_and_the_others_do_not(name):
    x = pictures(40, 40, 1)
    fixed = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "dark"}
    assert torch.equal(corrupt(x, name, 5, 0), corrupt(x, name, 5, 1)) == (name in fixed)


@pytest.mark.parametrize("size", [(48, 48), (160, 160)])
@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - NOT_MONOTONE))
def test_harm_grows_with_severity(name, size):
    x = pictures(*size)
    harm = [distance(corrupt(x, name, severity), x) for severity in range(1, 6)]
    loose = name in ("fog", "motion_blur") and size[0] > 64  # wider, or finer: the last two are about as far away
    if loose or name == "pixelate":  # whose cells may fall on those of the texture
        assert harm[0] < harm[4]
    else:
        assert all(after > 0.97 * before for before, after in itertools.pairwise(harm)), harm
        assert harm[4] > 1.2 * harm[0]


def test_simple_ones_by_hand():
    x = torch.full((1, 3, 8, 8), 0.5)
    x[0, 0] = 0.25
    made = corrupt(x, "brightness", 5)
    assert torch.allclose(made[0, :, 0, 0], torch.tensor([0.4, 0.8, 0.8]))  # value 0.5 + 0.3, hue as before
    assert torch.allclose(corrupt(torch.zeros(1, 3, 8, 8), "brightness", 5), torch.tensor(0.3))
    half = torch.cat([torch.zeros(1, 3, 8, 4), torch.ones(1, 3, 8, 4)], 3)
    assert corrupt(half, "contrast", 5)[0, 0, 0].tolist() == pytest.approx([0.425] * 4 + [0.575] * 4)
    noisy = corrupt(torch.full((1, 3, 300, 300), 0.5), "impulse_noise", 5)
    assert (noisy == 0).float().mean().item() == pytest.approx(0.135, abs=0.005)
    assert (noisy == 1).float().mean().item() == pytest.approx(0.135, abs=0.005)
    shot = corrupt(torch.full((1, 3, 300, 300), 0.5), "shot_noise", 1)
    assert shot.var().item() == pytest.approx(0.5 / 60, rel=0.02)
    flat = torch.full((1, 3, 40, 40), 0.3)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "pixelate"):
        assert (corrupt(flat, name, 5) - 0.3).abs().max() < 0.01, name  # what is flat stays so


def test_glass_only_moves_pixels():
    x = torch.rand(1, 3, 20, 20)
    made = corruptions.glass_blur(x[0], (0.0, 2, 1), np.random.default_rng(0))
    before = (255 * x[0]).floor() / 255
    pixels = {tuple(pixel) for pixel in before.flatten(1).t().tolist()}
    assert {tuple(pixel) for pixel in made.flatten(1).t().tolist()} < pixels  # copied, so that some are lost
    assert torch.equal(made[:, :2], before[:, :2])  # out of reach


@pytest.mark.parametrize(
    ("x", "name", "severity", "seeds", "message"),
    [
        (torch.rand(1, 3, 8, 8), "rain", 5, 0, "no corruption is called 'rain'"),
        (torch.rand(1, 3, 8, 8), "fog", 0, 0, "severity must be 1 to 5"),
        (torch.rand(1, 3, 8, 8) + 1, "fog", 1, 0, r"in \[0, 1\]"),
        (torch.rand(1, 1, 8, 8), "fog", 1, 0, "N x 3 x H x W"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "fog", 1, 0, "floating-point"),
        (torch.rand(2, 3, 8, 8), "fog", 1, [0], "a seed for each image"),
    ],
)
def test_what_it_refuses(x, name, severity, seeds, message):
    with pytest.raises(ValueError, match=message):
        corrupt(x, name, severity, seeds)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/data beside the repository: CIFAR-10-C")
@pytest.mark.parametrize("name", STANDARD)
def test_like_the_published_files(name):
    """As far from the clean images as theirs, and alike in brightness and contrast."""
    clean, theirs = (
        torch.from_numpy(np.load(REAL / f"{file}.npy")[:100]).permute(0, 3, 1, 2).float() / 255
        for file in ("clean", name)
    )
    ours = corrupt(clean, name, 5)
    assert distance(ours, clean) == pytest.approx(distance(theirs, clean), rel=0.2)
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=0.03)
    assert ours.std().item() == pytest.approx(theirs.std().item(), abs=0.03)
