"""Corrupted test images as a sequence of domains: CIFAR-10-C, CIFAR-100-C, ImageNet-C and ACDC from their folders."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
CONDITIONS = ("fog", "night", "rain", "snow")
SEVERITIES = 5
IMAGENET_SIZE, IMAGENET_RESIZE = 224, 256
ACDC_SIZE = (540, 960)
ACDC_CLASSES = 19
LAYOUTS = (
    "<corruption>.npy beside labels.npy (CIFAR-C), <corruption>/<severity>/<synset>/*.JPEG (ImageNet-C) or "
    "rgb_anon/<condition>/<split> beside gt (ACDC)"
)

Read = Callable[[list[int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Domain:
    """One corruption. `read` takes the numbers of some images and gives pixels in [0, 1] and labels."""

    name: str
    index: int  # in the stream: its order of images hangs on this and the seed
    read: Read
    numbers: list[int]
    shuffled: bool

    def __len__(self) -> int:
        return len(self.numbers)

    def batches(self, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images (N, C, H, W) and labels; the last one may be short."""
        if batch < 1:
            raise ValueError(f"batch must be 1 or more, got {batch}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        order = self.numbers
        if self.shuffled:
            generator = torch.Generator().manual_seed(seed << 16 | self.index)
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        for start in range(0, len(order), batch):
            yield self.read(order[start : start + batch])


@dataclass(frozen=True)
class Stream:
    """The domains in turn."""

    kind: str  # "cifar", "imagenet" or "acdc"
    domains: list[Domain]
    classes: int  # that labels tell apart

    @property
    def segmentation(self) -> bool:
        return self.kind == "acdc"

    def reordered(self, order: str, seed: int) -> Stream:
        """The domains as they are ("given") or in an order drawn from the seed ("random")."""
        if order == "given":
            return self
        if order != "random":
            raise ValueError(f"order must be 'given' or 'random', got {order!r}")
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.domains), generator=generator).tolist()
        return replace(self, domains=[self.domains[i] for i in chosen])


def open_stream(
    folder: str | Path,
    corruptions: Sequence[str] | None = None,
    severity: int = 5,
    limit: int | None = None,
    size: tuple[int, int] | None = None,
    split: str = "train",
) -> Stream:
    """The stream in a folder, whose layout tells what it is.

    `corruptions` names the domains in order, by default the standard ones. `severity`, 1 to 5, is of CIFAR-C and
    ImageNet-C, `split` of ACDC. `limit` takes that many images of each domain, evenly spread over it. `size` is what
    images of ImageNet-C (224x224) and ACDC (540x960) are brought to.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"data must be a folder of images, and {root} is none")
    if not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity must be 1 to {SEVERITIES}, got {severity}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    if (root / "labels.npy").exists():
        return _cifar(root, corruptions, severity, limit)
    if (root / "rgb_anon").is_dir():
        return _acdc(root, corruptions, limit, size or ACDC_SIZE, split)
    if any(path.is_dir() for path in root.glob("*/[1-5]")):
        return _imagenet(root, corruptions, severity, limit, size or (IMAGENET_SIZE, IMAGENET_SIZE))
    raise ValueError(f"{root} has none of the known layouts: {LAYOUTS}")


def _chosen(asked: Sequence[str] | None, standard: Sequence[str], present: Sequence[str], root: Path) -> list[str]:
    """The domains asked for, or those of the standard ones that are there."""
    names = list(asked) if asked else [name for name in standard if name in present]
    for name in names:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(present) or 'none'}"
            raise ValueError(f"{root} has no corruption called {name!r}; {hint}")
    if not names:
        raise ValueError(f"{root} has none of {', '.join(standard)}; name the corruptions to take")
    if len(set(names)) < len(names):
        raise ValueError(f"corruptions must differ, got {', '.join(names)}")
    return names


def _numbers(count: int, limit: int | None, first: int = 0) -> list[int]:
    """All numbers, or `limit` of them evenly spread: folders are sorted by class."""
    taken = min(count, limit or count)
    return [first + i * count // taken for i in range(taken)]


def _cifar(root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None) -> Stream:
    import numpy as np

    found = np.load(root / "labels.npy")
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        raise ValueError(f"{root}/labels.npy must hold a row of integers, got {found.dtype} of shape {found.shape}")
    labels = torch.from_numpy(found.astype(np.int64))
    repeats = len(found) % SEVERITIES == 0 and bool((found.reshape(SEVERITIES, -1) == found[: len(found) // 5]).all())
    present = sorted(path.stem for path in root.glob("*.npy") if path.stem != "labels")
    domains = []
    for index, name in enumerate(_chosen(corruptions, CORRUPTIONS, present, root)):
        images = np.load(root / f"{name}.npy", mmap_mode="r")
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
            raise ValueError(
                f"{root}/{name}.npy must hold uint8 images (N, height, width, 3), got {images.dtype} of shape "
                f"{images.shape}"
            )
        if len(images) not in (len(labels), SEVERITIES * len(labels)):
            raise ValueError(f"{root}/{name}.npy has {len(images)} images, and labels.npy {len(labels)} labels")
        several = len(images) > len(labels) or repeats
        if not several and severity != SEVERITIES:
            raise ValueError(f"severity {severity} cannot be picked: {root}/{name}.npy holds one severity alone")
        count = len(images) // SEVERITIES if several else len(images)
        numbers = _numbers(count, limit, (severity - 1) * count if several else 0)
        domains.append(Domain(name, index, _array_reader(images, labels), numbers, shuffled=True))
    return Stream("cifar", domains, int(labels.max()) + 1)


def _array_reader(images: Any, labels: Tensor) -> Read:
    def read(numbers: list[int]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images[numbers])  # a copy: the file is only mapped
        y = labels[torch.tensor(numbers) % len(labels)]
        return pixels.permute(0, 3, 1, 2).contiguous().float().div_(255), y

    return read


def _imagenet(
    root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None, size: tuple[int, int]
) -> Stream:
    present = sorted(path.name for path in root.iterdir() if (path / str(severity)).is_dir())
    domains, classes = [], 0
    for index, name in enumerate(_chosen(corruptions, CORRUPTIONS, present, root)):
        folder = root / name / str(severity)
        synsets = sorted(path for path in folder.iterdir() if path.is_dir())
        files = [(path, rank) for rank, synset in enumerate(synsets) for path in sorted(synset.glob("*.JPEG"))]
        if not files:
            raise ValueError(f"{folder} must hold <synset>/*.JPEG, and has no such image")
        classes = max(classes, len(synsets))

        def read(numbers: list[int], files: list[tuple[Path, int]] = files) -> tuple[Tensor, Tensor]:
            images = [_pixels(_cropped(_open(files[i][0]), size)) for i in numbers]
            return torch.stack(images), torch.tensor([files[i][1] for i in numbers])

        domains.append(Domain(name, index, read, _numbers(len(files), limit), shuffled=True))
    return Stream("imagenet", domains, classes)


def _acdc(
    root: Path, corruptions: Sequence[str] | None, limit: int | None, size: tuple[int, int], split: str
) -> Stream:
    present = sorted(path.name for path in (root / "rgb_anon").iterdir() if (path / split).is_dir())
    domains = []
    for index, name in enumerate(_chosen(corruptions, CONDITIONS, present, root / "rgb_anon")):
        folder = root / "rgb_anon" / name / split
        images = sorted(folder.glob("*/*_rgb_anon.png"))
        if not images:
            raise ValueError(f"{folder} must hold <sequence>/*_rgb_anon.png, and has no such image")
        labels = [_acdc_label(root, path) for path in images]
        if missing := [path for path in labels if not path.exists()]:
            raise ValueError(f"{len(missing)} of {len(images)} images have no label: the first would be {missing[0]}")

        def read(numbers: list[int], images: list[Path] = images, labels: list[Path] = labels) -> tuple[Tensor, Tensor]:
            x = torch.stack([_pixels(_resized(_open(images[i]), size)) for i in numbers])
            return x, torch.stack([_classes(labels[i]) for i in numbers])

        domains.append(Domain(name, index, read, _numbers(len(images), limit), shuffled=False))
    return Stream("acdc", domains, ACDC_CLASSES)


def _acdc_label(root: Path, image: Path) -> Path:
    name = image.name.replace("_rgb_anon", "_gt_labelTrainIds")
    return root / "gt" / image.relative_to(root / "rgb_anon").with_name(name)


def _open(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _resized(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image

    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def _cropped(image: Any, size: tuple[int, int]) -> Any:
    """As it is where the size is right; else the shorter side to 256 for 224, and the centre of that."""
    height, width = size
    if image.size == (width, height):
        return image
    scale = max(height / image.size[1], width / image.size[0]) * IMAGENET_RESIZE / IMAGENET_SIZE
    image = _resized(image, (round(image.size[1] * scale), round(image.size[0] * scale)))
    left, top = (image.size[0] - width) // 2, (image.size[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def _pixels(image: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def _classes(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        found = np.array(image)
    if found.ndim != 2:
        raise ValueError(f"{path} must hold one class a pixel, got an image of shape {found.shape}")
    return torch.from_numpy(found.astype(np.int64))
