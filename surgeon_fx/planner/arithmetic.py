"""What memory comes to, as pure functions on lists of facts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from surgeon_fx.kernels.layout import kept_count, mask_bytes
from surgeon_fx.ratio_table import shared_ratio


@dataclass(frozen=True)
class LayerInput:
    """One call of a conv, linear or norm layer."""

    layer: str
    kind: str  # "norm" or "product": the paper counts them apart
    numel: int
    itemsize: int
    output_bytes: int

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Saving:
    """One tensor saved by one operation, and how it is kept at any ratio.

    `kind`: "prune" shares `key` with whoever saves the same memory; at ratio 0 it is `storage` that is held. "norm" is
    the same at ratio 0, with `exact_bytes` beside it; pruned, it keeps a copy of its own and `fixed_bytes` beside that.
    "exact" holds `storage`, whatever the ratio, and so do those who would prune the same `key`. "rounded" holds
    `fixed_bytes`, unless somebody keeps `key` exactly, and those who would prune it share that. "fixed" holds
    `fixed_bytes`. What serves `sharers` too is kept at the lowest of their ratios; what can be rebuilt from the save of
    `source` (a layer, then those that share it) keeps `fixed_bytes` alone where that is at least as much as its own
    ratio wants. What is kept at the `places` of another save has no mask of its own where as many are kept of that.
    """

    kind: str
    owner: str | None = None
    key: Hashable = None
    storage: Hashable = None
    storage_bytes: int = 0
    numel: int = 0
    itemsize: int = 0
    fixed_bytes: int = 0
    exact_bytes: int = 0
    sharers: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def compressed_bytes(numel: int, itemsize: int, ratio: float) -> int:
    """Values and mask of a pruned tensor."""
    kept = kept_count(numel, ratio)
    return kept * itemsize + mask_bytes(numel, kept)


def held_bytes(savings: Iterable[Saving], ratios: Mapping[str, float]) -> int:
    """Bytes that backward holds: every tensor once, dense where anyone needs it so, else at the lowest ratio asked."""
    total = 0
    dense: set[Hashable] = set()
    storages: dict[Hashable, int] = {}
    rounded: dict[Hashable, int] = {}
    pruned: dict[Hashable, tuple[Saving, float]] = {}
    for saving in savings:
        ratio = 0.0 if saving.owner is None else shared_ratio(ratios, saving.owner, saving.sharers)
        rebuilt = shared_ratio(ratios, saving.source[0], saving.source[1:]) if saving.source else 0.0
        if saving.kind == "fixed":
            total += saving.fixed_bytes
        elif saving.kind == "rounded":
            rounded[saving.key] = max(saving.fixed_bytes, rounded.get(saving.key, 0))
        elif saving.kind == "exact":
            storages[saving.storage] = saving.storage_bytes
            if saving.key is not None:
                dense.add(saving.key)
        elif ratio == 0:
            dense.add(saving.key)
            storages[saving.storage] = saving.storage_bytes
            total += saving.exact_bytes
        elif saving.kind == "norm":
            total += compressed_bytes(saving.numel, saving.itemsize, ratio) + saving.fixed_bytes
        elif 0 < rebuilt <= ratio:
            total += saving.fixed_bytes
        else:
            before = pruned.get(saving.key, (saving, 1.0))
            pruned[saving.key] = (saving, min(ratio, before[1]))
    total += sum(storages.values()) + sum(size for key, size in rounded.items() if key not in dense)
    for key, (saving, ratio) in pruned.items():
        if key not in dense and key not in rounded:
            kept = kept_count(saving.numel, ratio)
            elsewhere = shared_ratio(ratios, saving.places[0], saving.places[1:]) if saving.places else 0.0
            has_mask = not elsewhere or kept_count(saving.numel, elsewhere) != kept
            total += kept * saving.itemsize + (mask_bytes(saving.numel, kept) if has_mask else 0)
    return total


def paper_cache_bytes(
    layers: Iterable[LayerInput], ratios: Mapping[str, float] | None = None, kind: str | None = None, mask: bool = False
) -> int:
    """The paper's count: the inputs of conv, linear and norm layers, each for itself, pruned at the layer's ratio.

    `kind` counts norm layers alone ("norm") or the others; `mask` adds one bit per element where something is pruned.
    """
    total = 0
    for layer in layers:
        if kind in (None, layer.kind):
            kept = kept_count(layer.numel, (ratios or {}).get(layer.layer, 0.0))
            total += kept * layer.itemsize + (mask_bytes(layer.numel, kept) if mask else 0)
    return total


def largest_bytes(layers: Iterable[LayerInput]) -> int:
    """The largest single input or output of a layer: what a forward without gradients needs, in the paper's count."""
    return max((max(layer.bytes, layer.output_bytes) for layer in layers), default=0)


def activation_memory(sizes: Mapping[str, int]) -> dict[str, float]:
    """The paper's Layer Activation Memory, M = -log(m / sum of m): layers with small inputs matter more."""
    total = sum(sizes.values())
    return {name: -math.log(size / total) if size else 0.0 for name, size in sizes.items()}


def max_normalised(values: Mapping[str, float]) -> dict[str, float]:
    """Values over the largest of them; all 1 where none stands out from 0."""
    most = max(values.values(), default=0.0)
    return {name: value / most if most > 0 else 1.0 for name, value in values.items()}
