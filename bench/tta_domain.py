"""A stream of test images as a sequence of domains, and the ways users run one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
SEVERITIES = 5
RAMP = (1, 2, 3, 4, 5, 4, 3, 2, 1)
KINDS = ("continual", "reset", "gradual", "mixed", "correlated")
CONCENTRATION = 0.1  # of the Dirichlet distribution that sorts a correlated stream by class

Read = Callable[[list[int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Domain:
    """One corruption. `read` takes the numbers of some images and gives pixels in [0, 1] and labels.

    `labels` are the images' classes, where they have one each. With a `concentration` images come sorted by class, more
    so the smaller it is.
    """

    name: str
    index: int  # in the stream: its order of images hangs on this and the seed
    read: Read
    numbers: list[int]
    shuffled: bool
    labels: list[int] | None = None
    concentration: float | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def batches(self, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images (N, C, H, W) and labels; the last one may be short."""
        if batch < 1:
            raise ValueError(f"batch must be 1 or more, got {batch}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        order = [self.numbers[i] for i in self._order(torch.Generator().manual_seed(seed << 16 | self.index))]
        for start in range(0, len(order), batch):
            yield self.read(order[start : start + batch])

    def _order(self, generator: torch.Generator) -> list[int]:
        if not self.shuffled:
            return list(range(len(self)))
        order = torch.randperm(len(self), generator=generator).tolist()
        if self.concentration is None:
            return order
        assert self.labels is not None
        return correlated_order(order, [self.labels[i] for i in order], self.concentration, generator)


def correlated_order(
    order: Sequence[int], labels: Sequence[int], concentration: float, generator: torch.Generator
) -> list[int]:
    """Images in slots, as many as classes; how a class spreads over the slots is drawn from a Dirichlet distribution.

    Within a slot classes come one after the other, in random order.
    """
    random = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    classes = sorted(set(labels))
    slots: list[list[list[int]]] = [[] for _ in classes]
    for label in classes:
        own = [i for i, one in zip(order, labels, strict=True) if one == label]
        shares = random.dirichlet([concentration] * len(classes))
        ends = (shares.cumsum() * len(own)).round().astype(int).tolist()
        ends[-1] = len(own)
        for slot, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            slots[slot].append(own[start:end])
    found = []
    for slot in slots:
        for i in torch.randperm(len(slot), generator=generator).tolist():
            found += slot[i]
    return found


@dataclass(frozen=True)
class Ramp:
    """One corruption that comes and goes: the same images at one severity after the other."""

    name: str
    levels: list[Domain]

    def __len__(self) -> int:
        return sum(map(len, self.levels))

    def batches(self, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for level in self.levels:
            yield from level.batches(batch, seed)


@dataclass(frozen=True)
class Stream:
    """The domains in turn."""

    kind: str  # "cifar", "imagenet", "acdc" or "camvid"
    domains: list[Domain | Ramp]
    classes: int  # that labels tell apart

    @property
    def segmentation(self) -> bool:
        return self.kind in ("acdc", "camvid")

    def reordered(self, order: str, seed: int) -> Stream:
        """The domains as they are ("given") or in an order drawn from the seed ("random")."""
        if order == "given":
            return self
        if order != "random":
            raise ValueError(f"order must be 'given' or 'random', got {order!r}")
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.domains), generator=generator).tolist()
        return replace(self, domains=[self.domains[i] for i in chosen])

    def rounds(self, count: int) -> Stream:
        """The same domains again and again; from the second round on names say which it is, as in fog@2."""
        again = [
            replace(domain, name=f"{domain.name}@{number}") for number in range(2, count + 1) for domain in self.domains
        ]
        return replace(self, domains=[*self.domains, *again])


def parse_kind(text: str) -> tuple[str, float | None]:
    """The kind of a stream, and how correlated: "correlated:0.1"."""
    kind, colon, number = text.partition(":")
    if kind not in KINDS or (colon and kind != "correlated"):
        raise ValueError(f"stream must be one of {', '.join(KINDS)}, or correlated:0.1, got {text!r}")
    try:
        concentration = float(number) if colon else CONCENTRATION
    except ValueError:
        concentration = 0.0
    if not 0 < concentration < math.inf:
        raise ValueError(f"the number of a correlated stream must be above 0, got {text!r}")
    return kind, concentration if kind == "correlated" else None


def mixed(stream: Stream) -> Stream:
    """One domain of all images of all domains, shuffled."""
    plain = [domain for domain in stream.domains if isinstance(domain, Domain)]
    places = [(domain, number) for domain in plain for number in domain.numbers]

    def read(numbers: list[int]) -> tuple[Tensor, Tensor]:
        pairs = [places[i][0].read([places[i][1]]) for i in numbers]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    return replace(stream, domains=[Domain("mixed", 0, read, list(range(len(places))), shuffled=True)])


def correlated(stream: Stream, concentration: float) -> Stream:
    """Each domain sorted by class."""
    domains: list[Domain | Ramp] = []
    for domain in stream.domains:
        if not isinstance(domain, Domain) or domain.labels is None:
            raise ValueError(f"a correlated stream sorts images by class, and those of {domain.name!r} have none")
        domains.append(replace(domain, concentration=concentration))
    return replace(stream, domains=domains)


def gradual(levels: Sequence[Stream]) -> Stream:
    """Each corruption from the lowest severity to the highest and back; `levels` are streams by severity."""
    ramps: list[Domain | Ramp] = []
    for i, domain in enumerate(levels[0].domains):
        own = [levels[severity - 1].domains[i] for severity in RAMP]
        ramps.append(Ramp(domain.name, [one for one in own if isinstance(one, Domain)]))
    return replace(levels[0], domains=ramps)
