"""`fit`: ratios that meet a byte budget.

Layers keep a share of their activation in proportion to their importance, `keep = level * importance`, and the level is
the highest that fits. Held bytes grow with the level, one kept element at a time, so the answer is as close to the
budget as elements allow; near 1, where a mask would cost more than the values it saves, an activation is kept whole.
One that is kept whole shares no save: where that is too large a step for what is left, the layer keeps just less, and
the level goes on without it; in the end as many such layers as still fit are kept whole after all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surgeon_fx.api import behind_door, is_transformed, rewrite_of
from surgeon_fx.planner import arithmetic, facts

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
STEPS = 60  # halvings: below one element of any tensor
PEAK_STEPS = 8  # each is a run of the whole program
CLOSE = 0.01  # share of the budget that may be left without looking for layers in the way
MOST_CAPPED = 32  # times that this is done


@dataclass(frozen=True)
class Fit:
    """Ratios that meet a budget. `gap` is what is left of it."""

    ratios: dict[str, float]
    budget_bytes: int
    what: str
    saved_bytes: int
    peak_bytes: int | None  # where it was asked for

    @property
    def gap_bytes(self) -> int:
        used = self.saved_bytes if self.what == "saved" or self.peak_bytes is None else self.peak_bytes
        return self.budget_bytes - used

    def __str__(self) -> str:
        mib = 1 << 20
        kept = [1 - ratio for ratio in self.ratios.values()]
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / mib:.1f} MiB"
        return (
            f"{self.what} within {self.budget_bytes / mib:.1f} MiB: held {self.saved_bytes / mib:.1f} MiB{peak}, "
            f"{self.gap_bytes / mib:.2f} MiB to spare; {len(kept)} layers keep "
            f"{100 * sum(kept) / max(len(kept), 1):.0f} % on average, {sum(k == 1 for k in kept)} of them everything"
        )


def parse_bytes(budget: str | int) -> int:
    """512MiB, 1.5 GB, or a number of bytes."""
    if isinstance(budget, (int, float)):
        return int(budget)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", budget)
    if not found or found[2].upper() not in UNITS:
        raise ValueError(f"budget must be bytes like '512MiB', got {budget!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])


def memory_term(layers: list[arithmetic.LayerInput]) -> dict[str, float]:
    """The paper's Layer Activation Memory, over its maximum: layers with small inputs matter more."""
    sizes: dict[str, int] = {}
    for layer in layers:
        sizes[layer.layer] = sizes.get(layer.layer, 0) + layer.bytes
    return arithmetic.max_normalised(arithmetic.activation_memory(sizes))


def fit(
    model: nn.Module,
    *inputs: Any,
    budget: str | int,
    what: str = "saved",
    importance: Mapping[str, float] | None = None,
    train: facts.Trains = None,
    device: str = "cpu",
    **named_inputs: Any,
) -> Fit:
    """Ratios for a transformed model that meet a budget for "saved" bytes or for the "peak"; the table is left alone.

    `importance` is a number per layer, as `refresh` finds it; without it the paper's memory term decides.
    `surgeon_fx.ratios(model).update(fit.ratios)` puts them to use.
    """
    model = behind_door(model)
    if not is_transformed(model):
        raise ValueError("fit finds ratios for a transformed model: call surgeon_fx.transform(model) first")
    if what not in ("saved", "peak"):
        raise ValueError(f"what must be 'saved' or 'peak', got {what!r}")
    names, wanted = list(rewrite_of(model).table), parse_bytes(budget)
    found = facts.step(model, inputs, named_inputs, 0.5, train, backward=False, device=device)
    if importance is None:
        importance = memory_term(found.layers)
    elif unknown := set(importance) - set(names):
        raise ValueError(f"importance names layers that are not there: {', '.join(sorted(unknown)[:3])}")
    most = max(importance.values(), default=0.0)
    shares = {name: max(importance.get(name, most), 0.0) / most if most > 0 else 1.0 for name in names}
    sizes = {saving.owner: saving.itemsize for saving in found.savings if saving.owner is not None}

    capped: set[str] = set()  # layers that are not kept whole

    def ratios(level: float) -> dict[str, float]:
        """Level 0 keeps nothing that can go, level 1 everything."""
        scale = level / (1 - level) if level < 1 else math.inf
        kept = {name: 1.0 if level == 1 else min(1.0, scale * share) for name, share in shares.items()}
        whole = {name: 1 - 1 / (8 * sizes.get(name, 4)) for name in names}
        at_most = {name: whole[name] if name in capped else 1.0 for name in names}
        return {name: 1 - at_most[name] if kept[name] >= whole[name] else 1 - kept[name] for name in names}

    def saved(level: float) -> int:
        return arithmetic.held_bytes(found.savings, ratios(level))

    def peak(level: float) -> int:
        return facts.step(model, inputs, named_inputs, ratios(level), train, device=device).peak_bytes

    cost, steps = (saved, STEPS) if what == "saved" else (peak, PEAK_STEPS)

    def highest(limit: int) -> tuple[float, float]:
        """The highest level that costs no more, and one just above it."""
        if cost(1.0) <= limit:
            return 1.0, 1.0
        if (least := cost(0.0)) > limit:
            raise ValueError(f"budget of {wanted} bytes for {what} cannot be met: the least possible is {least}")
        low, high = 0.0, 1.0
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) <= limit else (low, middle)
        return low, high

    level, above = highest(wanted)
    for _ in range(MOST_CAPPED if what == "saved" else 0):
        here, there = ratios(level), ratios(above)
        steps_to_whole = {name for name in names if here[name] and not there[name]}
        if not steps_to_whole or wanted - saved(level) <= CLOSE * wanted:
            break
        capped |= steps_to_whole
        level, above = highest(wanted)
    for name in sorted(capped, key=lambda name: shares[name], reverse=True):
        capped.remove(name)
        if saved(level) > wanted:
            capped.add(name)
    if what == "peak" or not is_autocast_on():
        return Fit(ratios(level), wanted, what, saved(level), peak(level) if what == "peak" else None)
    limit = wanted
    while True:  # a native layer keeps autocast's copy of its weight, and the arithmetic does not know which are native
        real = facts.step(model, inputs, named_inputs, ratios(level), train, backward=False, device=device).saved_bytes
        if real <= wanted:
            return Fit(ratios(level), wanted, what, real, None)
        limit -= real - wanted
        level, _ = highest(limit)


def is_autocast_on() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu", "mps"))
