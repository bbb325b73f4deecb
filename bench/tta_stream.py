"""The stream in a folder, whose layout tells what it is, run in one of the ways of `tta_domain.KINDS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tta_folders
from tta_domain import CORRUPTIONS, SEVERITIES, Domain, Stream, correlated, gradual, mixed, parse_kind
from tta_folders import ACDC_SIZE, CAMVID_SIZE, IMAGENET_CLASSES, IMAGENET_SIZE, IMAGES, SAMPLE

__all__ = ["CORRUPTIONS", "SYNTHETIC", "Domain", "Stream", "open_stream"]

LAYOUTS = (
    "<corruption>.npy beside labels.npy (CIFAR-C), <corruption>/<severity>/<synset>/*.JPEG (ImageNet-C), "
    "rgb_anon/<condition>/<split> beside gt (ACDC), <split>/images beside <split>/labels (CamVid), "
    "<class>_<synset>.jpg (ImageNet images) or <class>/*.jpg (ImageFolder)"
)
SYNTHETIC = "synthetic"
SPLITS = {"acdc": "train", "camvid": "test"}


def open_stream(
    folder: str | Path,
    corruptions: Sequence[str] | None = None,
    severity: int = 5,
    limit: int | None = None,
    size: tuple[int, int] | None = None,
    split: str | None = None,
    kind: str = "continual",
    rounds: int = 1,
    classes: int = IMAGENET_CLASSES,
) -> Stream:
    """The stream in a folder, or of "synthetic" images, whose labels are drawn from `classes`.

    `corruptions` names the domains in order, by default the standard ones. `severity`, 1 to 5, is that of corruptions;
    where files have one alone, others are made of clean images. `split` is of ACDC (train) and CamVid (test). `limit`
    takes that many images of each domain, evenly spread over it. `size` is what images of ImageNet (224x224), ACDC
    (540x960) and CamVid (240x320) are brought to. `kind` is how the stream runs, `rounds` how often.
    """
    root = Path(folder)
    if not root.is_dir() and str(folder) != SYNTHETIC:
        raise ValueError(f"data must be a folder of images, and {root} is none")
    if not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity must be 1 to {SEVERITIES}, got {severity}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    kind, concentration = parse_kind(kind)

    def at(level: int) -> Stream:
        if str(folder) == SYNTHETIC:
            return tta_folders.synthetic(classes, corruptions, level, limit, size or (IMAGENET_SIZE, IMAGENET_SIZE))
        return _open(root, corruptions, level, limit, size, split)

    if kind == "gradual":
        if at(severity).segmentation:
            raise ValueError(
                "a gradual stream changes the severity of corruptions, and road scenes have weather instead"
            )
        stream = gradual([at(level) for level in range(1, SEVERITIES + 1)])
    else:
        stream = at(severity)
        if kind == "mixed":
            stream = mixed(stream)
        elif concentration is not None:
            stream = correlated(stream, concentration)
    return stream.rounds(rounds)


def _open(
    root: Path,
    corruptions: Sequence[str] | None,
    severity: int,
    limit: int | None,
    size: tuple[int, int] | None,
    split: str | None,
) -> Stream:
    square = (IMAGENET_SIZE, IMAGENET_SIZE)
    if (root / "labels.npy").exists():
        return tta_folders.cifar(root, corruptions, severity, limit)
    if (root / "rgb_anon").is_dir():
        return tta_folders.acdc(root, corruptions, limit, size or ACDC_SIZE, split or SPLITS["acdc"])
    if any(path.is_dir() for path in root.glob("*/[1-5]")):
        return tta_folders.imagenet(root, corruptions, severity, limit, size or square)
    if any(path.is_dir() for path in root.glob("*/images")):
        return tta_folders.camvid(root, corruptions, severity, limit, size or CAMVID_SIZE, split or SPLITS["camvid"])
    if any(SAMPLE.fullmatch(path.name) for path in root.iterdir()):
        return tta_folders.samples(root, corruptions, severity, limit, size or square)
    if any(path.suffix.lower() in IMAGES for path in root.glob("*/*")):
        return tta_folders.image_folder(root, corruptions, severity, limit, size or square)
    raise ValueError(f"{root} has none of the known layouts: {LAYOUTS}")
