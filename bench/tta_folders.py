"""Folders of test images as domains: CIFAR-10-C, CIFAR-100-C, ImageNet-C, ACDC, CamVid, and folders of images."""

from __future__ import annotations

import difflib
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from corruptions import CORRUPTIONS as MADE
from corruptions import corrupt
from torch import Tensor
from tta_domain import CORRUPTIONS, SEVERITIES, Domain, Read, Stream

CONDITIONS = ("fog", "night", "rain", "snow")
IMAGENET_SIZE, IMAGENET_RESIZE, IMAGENET_CLASSES = 224, 256, 1000
ACDC_SIZE = (540, 960)
ACDC_CLASSES = 19
CAMVID_SIZE = (240, 320)
CAMVID_CLASSES, CAMVID_VOID, IGNORED = 11, 11, 255
CAMVID_DOMAINS = ("day", "dusk", "fog", "snow", "night")
CAMVID_SEQUENCES = {"dusk": "0001TP"}  # by the start of their names; the others are by day
SYNTHETIC = 2000  # images of a synthetic stream
IMAGES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
SYNSET = re.compile(r"n\d{8}")
SAMPLE = re.compile(r"(\d{4})_n\d{8}\.jpg")


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


def made(read: Read, name: str, severity: int) -> Read:
    """A reader whose images are corrupted on the fly; an image's number is its seed."""

    def corrupted(numbers: list[int]) -> tuple[Tensor, Tensor]:
        x, y = read(numbers)
        return corrupt(x, name, severity, numbers), y

    return corrupted


def _numbers(count: int, limit: int | None, first: int = 0) -> list[int]:
    """All numbers, or `limit` of them evenly spread: folders are sorted by class."""
    taken = min(count, limit or count)
    return [first + i * count // taken for i in range(taken)]


def cifar(root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None) -> Stream:
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
        read = _array_reader(images, labels)
        if not several and severity != SEVERITIES:
            read = made(_array_reader(_clean(root, name, severity), labels), name, severity)
        count = len(images) // SEVERITIES if several else len(images)
        numbers = _numbers(count, limit, (severity - 1) * count if several else 0)
        own = [int(labels[i % len(labels)]) for i in numbers]
        domains.append(Domain(name, index, read, numbers, shuffled=True, labels=own))
    return Stream("cifar", domains, int(labels.max()) + 1)


def _clean(root: Path, name: str, severity: int) -> Any:
    """The images that a corruption is made of, where its file has one severity alone."""
    import numpy as np

    if not (root / "clean.npy").exists() or name not in MADE:
        raise ValueError(
            f"severity {severity} cannot be picked: {root}/{name}.npy holds one severity alone, and there is no "
            "clean.npy to make it of"
        )
    return np.load(root / "clean.npy", mmap_mode="r")


def _array_reader(images: Any, labels: Tensor) -> Read:
    def read(numbers: list[int]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(images[numbers])  # a copy: the file is only mapped
        y = labels[torch.tensor(numbers) % len(labels)]
        return pixels.permute(0, 3, 1, 2).contiguous().float().div_(255), y

    return read


def imagenet(
    root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None, size: tuple[int, int]
) -> Stream:
    present = sorted(path.name for path in root.iterdir() if (path / str(severity)).is_dir())
    domains, classes = [], 0
    for index, name in enumerate(_chosen(corruptions, CORRUPTIONS, present, root)):
        folder = root / name / str(severity)
        files, count = class_files(folder)
        classes = max(classes, count)
        numbers = _numbers(len(files), limit)
        own = [files[i][1] for i in numbers]
        domains.append(Domain(name, index, _file_reader(files, size), numbers, shuffled=True, labels=own))
    return Stream("imagenet", domains, classes)


def _file_reader(files: list[tuple[Path, int]], size: tuple[int, int]) -> Read:
    def read(numbers: list[int]) -> tuple[Tensor, Tensor]:
        images = [_pixels(_cropped(_open(files[i][0]), size)) for i in numbers]
        return torch.stack(images), torch.tensor([files[i][1] for i in numbers])

    return read


def class_files(root: Path) -> tuple[list[tuple[Path, int]], int]:
    """Images of <class>/<image> with their labels, and the number of classes that labels are drawn from.

    A synset of ImageNet has its index among the 1,000 classes (n02123045 is 281), whichever folders are there. Other
    names are numbered in alphabetical order, as torchvision's ImageFolder does.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = [path.name for path in folders]
    synsets = bool(names) and all(map(SYNSET.fullmatch, names))
    labels = synset_indices(names) if synsets else list(range(len(names)))
    files = [(path, label) for folder, label in zip(folders, labels, strict=True) for path in sorted(folder.iterdir())]
    files = [(path, label) for path, label in files if path.suffix.lower() in IMAGES]
    if not files:
        raise ValueError(f"{root} must hold <class>/*{'|'.join(IMAGES)}, and has no such image")
    return files, IMAGENET_CLASSES if synsets else len(names)


def synset_indices(names: Sequence[str]) -> list[int]:
    """The index of each synset among the 1,000 classes of ImageNet."""
    if len(names) == IMAGENET_CLASSES:  # all of them: the index is the rank
        return list(range(IMAGENET_CLASSES))
    try:
        from timm.data import ImageNetInfo
    except ImportError as error:
        raise ImportError(
            f"{len(names)} synsets of {IMAGENET_CLASSES} are there: which they are is read from timm (pip install timm)"
        ) from error
    known = {name: index for index, name in enumerate(ImageNetInfo().label_names())}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no synset of ImageNet's {IMAGENET_CLASSES} classes")
    return [known[name] for name in names]


def image_folder(
    root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None, size: tuple[int, int]
) -> Stream:
    """Images in a folder per class, under corruptions made on the fly."""
    files, classes = class_files(root)
    return _made_stream(
        root, _file_reader(files, size), [label for _, label in files], classes, corruptions, severity, limit
    )


def synthetic(
    classes: int, corruptions: Sequence[str] | None, severity: int, limit: int | None, size: tuple[int, int]
) -> Stream:
    """Smooth random images with random labels: for memory and time, which do not depend on what is seen."""
    labels = torch.randint(classes, (SYNTHETIC,), generator=torch.Generator().manual_seed(0)).tolist()

    def read(numbers: list[int]) -> tuple[Tensor, Tensor]:
        coarse = [torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in numbers]
        x = torch.nn.functional.interpolate(torch.cat(coarse), size=size, mode="bilinear")
        return x, torch.tensor([labels[i] for i in numbers])

    return _made_stream(Path("synthetic"), read, labels, classes, corruptions, severity, limit)


def _made_stream(
    root: Path,
    read: Read,
    labels: Sequence[int],
    classes: int,
    corruptions: Sequence[str] | None,
    severity: int,
    limit: int | None,
) -> Stream:
    """Clean images as a stream of corruptions made on the fly; `clean` is one of them."""
    numbers = _numbers(len(labels), limit)
    own = [labels[i] for i in numbers]
    domains = [
        Domain(name, index, read if name == "clean" else made(read, name, severity), numbers, True, own)
        for index, name in enumerate(_chosen(corruptions, CORRUPTIONS, [*MADE, "clean"], root))
    ]
    return Stream("imagenet", domains, classes)


def samples(
    root: Path, corruptions: Sequence[str] | None, severity: int, limit: int | None, size: tuple[int, int]
) -> Stream:
    """Clean ImageNet images, whose names start with their class, under corruptions made on the fly."""
    files = [path for path in sorted(root.iterdir()) if SAMPLE.fullmatch(path.name)]
    labels = [int(path.name[:4]) for path in files]
    read = _file_reader(list(zip(files, labels, strict=True)), size)
    return _made_stream(root, read, labels, IMAGENET_CLASSES, corruptions, severity, limit)


def camvid(
    root: Path,
    corruptions: Sequence[str] | None,
    severity: int,
    limit: int | None,
    size: tuple[int, int],
    split: str,
) -> Stream:
    """Road scenes by day and at dusk, and those by day under corruptions made on the fly."""
    files = camvid_files(root, split)
    domains = []
    for index, name in enumerate(_chosen(corruptions, CAMVID_DOMAINS, ["day", "dusk", *MADE], root)):
        sequence = CAMVID_SEQUENCES.get(name)
        others = tuple(CAMVID_SEQUENCES.values())
        own = [
            pair
            for pair in files
            if (pair[0].name.startswith(sequence) if sequence else not pair[0].name.startswith(others))
        ]
        if not own:
            raise ValueError(f"{root}/{split} has no images for {name!r}")

        def read(numbers: list[int], own: list[tuple[Path, Path]] = own) -> tuple[Tensor, Tensor]:
            return read_camvid([own[i] for i in numbers], size)

        reader = made(read, name, severity) if name in MADE else read
        domains.append(Domain(name, index, reader, _numbers(len(own), limit), shuffled=False))
    return Stream("camvid", domains, CAMVID_CLASSES)


def camvid_files(root: Path, split: str) -> list[tuple[Path, Path]]:
    """Images and their labels."""
    images = sorted((root / split / "images").glob("*.jpg"))
    pairs = [(path, root / split / "labels" / f"{path.stem}.png") for path in images]
    if not pairs or not all(label.exists() for _, label in pairs):
        raise ValueError(f"{root}/{split} must hold images/*.jpg, and labels/*.png of the same names")
    return pairs


def read_camvid(files: Sequence[tuple[Path, Path]], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images in a size, and labels in their own; void pixels do not count."""
    x = torch.stack([_pixels(_resized(_open(image), size)) for image, _ in files])
    y = torch.stack([_classes(label) for _, label in files])
    return x, y.masked_fill(y == CAMVID_VOID, IGNORED)


def acdc(root: Path, corruptions: Sequence[str] | None, limit: int | None, size: tuple[int, int], split: str) -> Stream:
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


def read_images(path: Path, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Pixels as bytes, channels first, and labels, of an .npz of JPEG bytes with offsets; `limit` takes the first."""
    import numpy as np
    from PIL import Image

    file = np.load(path)
    data, offsets = file["data"].tobytes(), file["offsets"]
    parts = itertools.islice(itertools.pairwise(offsets), limit)
    images = np.stack([np.asarray(Image.open(io.BytesIO(data[a:b]))) for a, b in parts])
    labels = torch.from_numpy(file["labels"]).long()[: len(images)]
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


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
        raise ValueError(f"{path} must hold one class per pixel, got an image of shape {found.shape}")
    return torch.from_numpy(found.astype(np.int64))
