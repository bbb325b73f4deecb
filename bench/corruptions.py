"""The fifteen corruptions of ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich, 2019), and darkness.

    made = corrupt(x, "fog", severity=3, seeds=[0, 1, 2, 3])

From the published formulas and constants, for images of any size: those of CIFAR-10-C up to 64 pixels, those of
ImageNet-C above. `x` are images N x 3 x H x W with pixels in [0, 1], and so is what comes back. Each image has a seed:
what is done to it does not depend on the batch it is in. Two differ from the originals, whose ingredients are files or
programs: frost is a made pattern of crystals instead of photographs, and motion blur is a sum of shifts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

SMALL = 64  # pixels: images up to this size get the constants of CIFAR-10-C
SEVERITIES = 5
Corruption = Callable[[Tensor, Any, np.random.Generator], Tensor]

# By corruption: the constants for small images and for others, one a severity.
CONSTANTS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "gaussian_noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": ((500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
    "impulse_noise": ((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "glass_blur": (
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    "motion_blur": (
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    "zoom_blur": (
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    "snow": (
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    "fog": (
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (  # of the image's side: strength, smoothness, and how far corners move
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
    "dark": ((0.7, 0.55, 0.4, 0.3, 0.2), (0.7, 0.55, 0.4, 0.3, 0.2)),
    # light left, exponent, noise of the sensor
    "night": (((0.6, 1.2, 0.01), (0.45, 1.4, 0.02), (0.35, 1.6, 0.03), (0.25, 1.8, 0.04), (0.18, 2.0, 0.05)),) * 2,
}


def corrupt(x: Tensor, name: str, severity: int = 5, seeds: Sequence[int] | int = 0) -> Tensor:
    """Corrupted copies of images N x 3 x H x W; a seed for each, or one whose successors are those of the next."""
    if name not in CORRUPTIONS:
        raise ValueError(f"no corruption is called {name!r}; there are {', '.join(CORRUPTIONS)}")
    if not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity must be 1 to {SEVERITIES}, got {severity}")
    if x.dim() != 4 or x.shape[1] != 3 or not x.is_floating_point():
        raise ValueError(f"images must be N x 3 x H x W of floating-point pixels, got {x.dtype} {tuple(x.shape)}")
    if x.numel() and (x.min() < 0 or x.max() > 1):
        raise ValueError("pixels must be in [0, 1]")
    seeds = range(seeds, seeds + len(x)) if isinstance(seeds, int) else seeds
    if len(seeds) != len(x):
        raise ValueError(f"there must be a seed for each image, got {len(seeds)} for {len(x)}")
    constants = CONSTANTS[name][min(x.shape[2:]) > SMALL][severity - 1]
    kind = list(CORRUPTIONS).index(name)
    made = [
        CORRUPTIONS[name](image.float().contiguous(), constants, np.random.default_rng([kind, severity, seed]))
        for image, seed in zip(x, seeds, strict=True)
    ]
    return torch.stack(made).clamp(0, 1).to(x.dtype) if made else x.clone()


def _normal(shape: Sequence[int], random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))


def gaussian_noise(x: Tensor, scale: float, random: np.random.Generator) -> Tensor:
    return x + scale * _normal(x.shape, random)


def shot_noise(x: Tensor, photons: float, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.poisson(x.numpy() * photons).astype(np.float32)) / photons


def impulse_noise(x: Tensor, share: float, random: np.random.Generator) -> Tensor:
    """Values set to 0 or 1, each with half the share."""
    draw = torch.from_numpy(random.random(x.shape, dtype=np.float32))
    return torch.where(draw < share / 2, 0.0, torch.where(draw < share, 1.0, x))


def _blurred(x: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Gaussian blur of C x H x W with mirrored edges."""
    radius = int(truncate * sigma + 0.5)
    if sigma <= 0 or not radius:
        return x
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma).square())
    line = (line / line.sum()).view(1, 1, 1, -1)
    out = F.conv2d(_padded(x.unsqueeze(1), radius, 0), line)
    return F.conv2d(_padded(out, 0, radius), line.transpose(2, 3)).squeeze(1)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """Mirrored as far as there is something to mirror, and the edge repeated beyond."""
    mirrored = [min(columns, x.shape[3] - 1)] * 2 + [min(rows, x.shape[2] - 1)] * 2
    x = F.pad(x, mirrored, mode="reflect")
    return F.pad(x, [columns - mirrored[0]] * 2 + [rows - mirrored[2]] * 2, mode="replicate")


def defocus_blur(x: Tensor, constants: tuple[float, float], random: np.random.Generator) -> Tensor:
    """A disk, its edge softened."""
    radius, soft = constants
    reach = 8 if radius <= 8 else int(radius)
    line = torch.arange(-reach, reach + 1.0)
    disk = (line.view(-1, 1).square() + line.square() <= radius * radius).float()
    small = 3 if radius <= 8 else 5
    kernel = _blurred((disk / disk.sum()).unsqueeze(0), soft, truncate=(small // 2) / soft)
    kernel = kernel / kernel.sum()
    return F.conv2d(_padded(x.unsqueeze(1), reach, reach), kernel.unsqueeze(0)).squeeze(1)


def glass_blur(x: Tensor, constants: tuple[float, int, int], random: np.random.Generator) -> Tensor:
    """Blur, pixels overwritten by near ones one after the other, blur.

    The published code means to exchange them, but assigns views of one array, so that this is what it does.
    """
    sigma, reach, rounds = constants
    height, width = x.shape[1:]
    x = (_blurred(x, sigma) * 255).floor() / 255
    places = list(range(height * width))
    for _ in range(rounds):
        moves = random.integers(-reach, reach, (height, width, 2)).tolist()
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                right, down = moves[row][column]
                a, b = row * width + column, (row + down) * width + column + right
                places[a] = places[b]
    return _blurred(x.flatten(1)[:, places].view(x.shape), sigma)


def _moved(x: Tensor, angle: float, radius: int, sigma: float) -> Tensor:
    """Smeared along a line, the near past most."""
    steps = torch.arange(2 * radius + 1.0)
    weights = torch.exp(-0.5 * (steps / sigma).square())
    weights = weights / weights.sum()
    places = [(round(step * math.sin(angle)), round(step * math.cos(angle))) for step in range(len(weights))]
    reach = max(max(map(abs, place)) for place in places)
    padded = F.pad(x, [reach] * 4, mode="replicate")
    out, (height, width) = torch.zeros_like(x), x.shape[1:]
    for (down, right), weight in zip(places, weights.tolist(), strict=True):
        top, left = reach + down, reach + right
        out.add_(padded[:, top : top + height, left : left + width], alpha=weight)
    return out


def motion_blur(x: Tensor, constants: tuple[int, float], random: np.random.Generator) -> Tensor:
    return _moved(x, math.radians(random.uniform(-45, 45)), constants[0], constants[1])


def _zoomed(x: Tensor, factor: float) -> Tensor:
    """The centre, enlarged to the image's size."""
    height, width = x.shape[1:]
    rows, columns = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - columns) // 2
    part = x[:, top : top + rows, left : left + columns].unsqueeze(0)
    size = (max(height, round(rows * factor)), max(width, round(columns * factor)))
    part = F.interpolate(part, size=size, mode="bilinear", align_corners=True).squeeze(0)
    top, left = (part.shape[1] - height) // 2, (part.shape[2] - width) // 2
    return part[:, top : top + height, left : left + width]


def zoom_blur(x: Tensor, constants: tuple[float, float], random: np.random.Generator) -> Tensor:
    end, step = constants
    factors = np.arange(1, end, step).tolist()
    return (x + sum(_zoomed(x, factor) for factor in factors)) / (len(factors) + 1)


def snow(x: Tensor, constants: Sequence[float], random: np.random.Generator) -> Tensor:
    """Flakes, zoomed, cut off and moved, on a paler image; twice, the second time upside down."""
    mean, deviation, zoom, threshold, radius, sigma, keep = constants
    flakes = mean + deviation * _normal((1, *x.shape[1:]), random)
    flakes = _zoomed(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1)
    flakes = _moved(flakes, math.radians(random.uniform(-135, -45)), int(radius), sigma)
    grey = 0.299 * x[:1] + 0.587 * x[1:2] + 0.114 * x[2:]
    pale = keep * x + (1 - keep) * torch.maximum(x, grey * 1.5 + 0.5)
    return pale + flakes + flakes.rot90(2, (1, 2))


def _plasma(side: int, decay: float, random: np.random.Generator) -> np.ndarray:
    """A cloud by the diamond-square algorithm on a torus, values in [0, 1]; `side` is a power of two."""
    cloud = np.zeros((side, side))
    step, wiggle = side, 100.0
    while step >= 2:
        half = step // 2
        corners = cloud[0:side:step, 0:side:step]
        total = corners + np.roll(corners, -1, axis=0)
        total = total + np.roll(total, -1, axis=1)
        cloud[half:side:step, half:side:step] = total / 4 + wiggle * random.uniform(-wiggle, wiggle, total.shape)
        centres = cloud[half:side:step, half:side:step]
        left = centres + np.roll(centres, 1, axis=0)
        above = corners + np.roll(corners, -1, axis=1)
        cloud[0:side:step, half:side:step] = (left + above) / 4 + wiggle * random.uniform(-wiggle, wiggle, left.shape)
        left = centres + np.roll(centres, 1, axis=1)
        above = corners + np.roll(corners, -1, axis=0)
        cloud[half:side:step, 0:side:step] = (left + above) / 4 + wiggle * random.uniform(-wiggle, wiggle, left.shape)
        step, wiggle = half, wiggle / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


def _cloud(x: Tensor, decay: float, random: np.random.Generator) -> Tensor:
    height, width = x.shape[1:]
    side = 1 << (max(height, width) - 1).bit_length()
    return torch.from_numpy(_plasma(max(side, 2), decay, random)[:height, :width].astype(np.float32))


def fog(x: Tensor, constants: tuple[float, float], random: np.random.Generator) -> Tensor:
    """A cloud, lighter where the image was lightest."""
    strength, decay = constants
    most = x.max()
    return (x + strength * _cloud(x, decay, random)) * most / (most + strength)


def frost(x: Tensor, constants: tuple[float, float], random: np.random.Generator) -> Tensor:
    """Crystals: the ridges of clouds at several angles, bluish white, denser at the rim."""
    keep, strength = constants
    height, width = x.shape[1:]
    ridges = torch.stack([1 - (2 * _cloud(x, 1.6, random) - 1).abs() for _ in range(3)])
    pattern = ridges.amax(0).pow(8)
    rows, columns = torch.linspace(-1, 1, height).view(-1, 1), torch.linspace(-1, 1, width)
    rim = (rows.square() + columns.square()) / 2
    pattern = (0.5 + 0.7 * pattern) * (0.8 + 0.2 * rim)
    color = torch.tensor([0.86, 0.93, 1.0]).view(3, 1, 1)
    return keep * x + strength * color * pattern


def brightness(x: Tensor, added: float, random: np.random.Generator) -> Tensor:
    """Added to the value of hue, saturation and value."""
    value = x.amax(0, keepdim=True)
    raised = (value + added).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-8), raised)


def contrast(x: Tensor, factor: float, random: np.random.Generator) -> Tensor:
    mean = x.mean((1, 2), keepdim=True)
    return (x - mean) * factor + mean


def elastic_transform(x: Tensor, constants: tuple[float, float, float], random: np.random.Generator) -> Tensor:
    """A small affine move, then every pixel pulled by a smooth random field."""
    side = float(min(x.shape[1:]))
    strength, sigma, corner = (constant * side for constant in constants)
    height, width = x.shape[1:]
    square = side // 3
    points = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]) * square
    moved = points + random.uniform(-corner, corner, points.shape)
    homogeneous = np.concatenate([moved, np.ones((3, 1))], axis=1)
    back = np.linalg.solve(homogeneous, points)  # of a target point, the source
    rows = np.arange(height)[:, None] - height / 2 + 0.0 * np.arange(width)
    columns = np.arange(width)[None] - width / 2 + 0.0 * np.arange(height)[:, None]
    source = np.stack([columns, rows, np.ones_like(rows)], axis=-1) @ back
    field = torch.from_numpy(random.uniform(-1, 1, (2, height, width)).astype(np.float32))
    field = strength * (_blurred(field, sigma, truncate=3.0) if sigma else field)
    x = _sampled(x, torch.from_numpy(source.astype(np.float32)) + torch.tensor([width / 2, height / 2]))
    own = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1)
    return _sampled(x, own + field.permute(1, 2, 0))


def _sampled(x: Tensor, places: Tensor) -> Tensor:
    """The image at other places, H x W x 2 of column and row; mirrored beyond its edges."""
    height, width = x.shape[1:]
    grid = 2 * places / torch.tensor([max(width - 1, 1), max(height - 1, 1)]) - 1
    options = {"mode": "bilinear", "padding_mode": "reflection", "align_corners": True}
    return F.grid_sample(x.unsqueeze(0), grid.unsqueeze(0), **options).squeeze(0)


def _image(x: Tensor) -> Any:
    return Image.fromarray((x.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def pixelate(x: Tensor, share: float, random: np.random.Generator) -> Tensor:
    height, width = x.shape[1:]
    small = _image(x).resize((max(int(width * share), 1), max(int(height * share), 1)), Image.Resampling.BOX)
    return _pixels(small.resize((width, height), Image.Resampling.NEAREST))


def jpeg_compression(x: Tensor, quality: int, random: np.random.Generator) -> Tensor:
    file = io.BytesIO()
    _image(x).save(file, "JPEG", quality=quality)
    return _pixels(Image.open(file).convert("RGB"))


def dark(x: Tensor, left: float, random: np.random.Generator) -> Tensor:
    return x * left


def night(x: Tensor, constants: tuple[float, float, float], random: np.random.Generator) -> Tensor:
    """Little light, bluish, deep shadows, and the noise of a sensor."""
    left, exponent, noise = constants
    color = torch.tensor([0.85, 0.9, 1.15]).view(3, 1, 1)
    return left * color * x.pow(exponent) + noise * _normal(x.shape, random)


CORRUPTIONS: dict[str, Corruption] = {
    function.__name__: function
    for function in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, frost, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression, dark, night),
    )
}
