"""Labelled source data, for the methods that ask for it: EATA's Fisher information, EcoTTA's warm-up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS
from torch import Tensor
from tta_domain import Stream
from tta_folders import (
    CAMVID_SIZE,
    IMAGENET_SIZE,
    IMAGES,
    SAMPLE,
    camvid_files,
    image_folder,
    read_camvid,
    read_images,
    samples,
)

from surgeon_fx.adapt import EcoTTA

FISHER_SAMPLES = 2000  # as EATA's authors take
WARM_UP_EPOCHS = 10


class Source:
    """Batches of images and labels, in another order each time they are gone through."""

    def __init__(
        self, path: str, batch: int, limit: int | None = None, seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        self.x, self.y = read_source(Path(path), limit)
        self.batch, self.generator, self.device = batch, torch.Generator().manual_seed(seed), device

    def __len__(self) -> int:
        return max(1, len(self.x) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x), generator=self.generator)
        for chosen in order[: len(self) * self.batch].split(self.batch):
            yield self.x[chosen].to(self.device).float() / 255, self.y[chosen].to(self.device)

    def images(self) -> Iterator[Tensor]:
        return (x for x, _ in self)


def read_source(path: Path, limit: int | None) -> tuple[Tensor, Tensor]:
    """Pixels as bytes and labels: of JPEG bytes in an .npz, of a folder of images, of CamVid's train split."""
    if path.suffix == ".npz" and path.is_file():
        return read_images(path, limit)
    if path.is_dir() and (path / "train" / "images").is_dir():
        x, y = read_camvid(camvid_files(path, "train")[:limit], CAMVID_SIZE)
    elif path.is_dir() and (layout := _layout(path)) is not None:
        (domain,) = layout(path, ["clean"], 5, limit, (IMAGENET_SIZE, IMAGENET_SIZE)).domains
        x, y = next(iter(domain.batches(len(domain))))
    else:
        raise ValueError(f"--source must be an .npz of JPEG bytes or a folder of clean images, and {path} is neither")
    return (x * 255).round().to(torch.uint8), y


def _layout(folder: Path) -> Callable[..., Stream] | None:
    """What reads a folder of clean images."""
    if any(SAMPLE.fullmatch(file.name) for file in folder.iterdir()):
        return samples
    return image_folder if any(file.suffix.lower() in IMAGES for file in folder.glob("*/*")) else None


def warm_up(adapter: EcoTTA, source: str, batch: int, epochs: int, limit: int | None, key: dict[str, Any]) -> None:
    """Warms EcoTTA up, or takes what an earlier run has learnt; `key` is all that makes it what it is."""
    device = next(adapter.model.parameters()).device
    key = {**key, "source": version(source), "epochs": epochs, "limit": limit, "batch": batch}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = RESULTS / f"ecotta_{name}.pt"
    if file.exists():
        adapter.load_state_dict(torch.load(file, weights_only=True, map_location=device))
        return
    adapter.warm_up(Source(source, batch, limit, device=device), epochs=epochs)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(adapter.state_dict(), file)


def version(path: str | Path | None) -> list[Any] | None:
    """What tells a file or folder from others, and from itself once it has changed."""
    if path is None:
        return None
    where = Path(path).resolve()
    found = where.stat()
    return [str(where), found.st_size, found.st_mtime_ns]
