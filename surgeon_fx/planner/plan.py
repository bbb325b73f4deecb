"""`plan`: the memory of one step, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from surgeon_fx.api import behind_door, is_transformed, rewrite_of, transformed_part
from surgeon_fx.distributed import unwrapped
from surgeon_fx.modules import trains
from surgeon_fx.planner import arithmetic, facts
from surgeon_fx.planner.arithmetic import LayerInput
from surgeon_fx.planner.ranks import RankMemory, rank_memory


@dataclass(frozen=True)
class PlanRow:
    """One tensor that backward would keep alive."""

    layer: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    ratio: float | None  # of its layer, where it has one
    dense_bytes: int
    held_bytes: int
    share: float  # of all held bytes
    handled: bool
    reason: str
    source: str


@dataclass(frozen=True)
class Plan:
    """Memory of one training step in three accountings: the paper's, what backward holds, and the peak.

    `timeline` has live activation bytes after each operation and the module that ran, through forward (the first
    `forward_operations` of it) and backward.
    """

    model: str
    inputs: str
    transformed: bool
    rows: list[PlanRow]
    layers: list[LayerInput]
    ratios: dict[str, float]
    saved_bytes: int
    timeline: list[tuple[str, int]]
    forward_operations: int
    rank: RankMemory | None = None  # of several, where they were asked for

    @property
    def eager_bytes(self) -> int:
        """What the rows come to dense: what eager keeps."""
        return sum(row.dense_bytes for row in self.rows)

    @property
    def peak_bytes(self) -> int:
        return max((live for _, live in self.timeline), default=0)

    @property
    def peak_at(self) -> str:
        """Where the peak is: forward and the module, or backward, which runs in none."""
        if not self.timeline:
            return ""
        index = max(range(len(self.timeline)), key=lambda i: self.timeline[i][1])
        return f"forward {self.timeline[index][0]}".strip() if index < self.forward_operations else "backward"

    @property
    def paper_cache_bytes(self) -> int:
        """Inputs of every conv, linear and norm layer at its ratio, as the paper counts: values alone."""
        return arithmetic.paper_cache_bytes(self.layers, self.ratios)

    @property
    def paper_cache_bytes_with_mask(self) -> int:
        return arithmetic.paper_cache_bytes(self.layers, self.ratios, mask=True)

    @property
    def paper_norm_bytes(self) -> int:
        """Inputs of norm layers alone, dense: the paper's figure for TENT."""
        return arithmetic.paper_cache_bytes(self.layers, kind="norm")

    @property
    def paper_largest_bytes(self) -> int:
        """The largest input or output of a layer: the paper's figure for a forward without gradients."""
        return arithmetic.largest_bytes(self.layers)

    def __str__(self) -> str:
        from surgeon_fx.planner import report

        return report.table(self)

    def to_json(self, path: str | Path | None = None) -> str:
        from surgeon_fx.planner import report

        return report.to_json(self, path)

    def to_csv(self, path: str | Path | None = None) -> str:
        from surgeon_fx.planner import report

        return report.to_csv(self, path)

    def to_html(self, path: str | Path | None = None) -> str:
        from surgeon_fx.planner import report

        return report.to_html(self, path)

    def plot(self, path: str | Path) -> None:
        from surgeon_fx.planner import report

        report.plot(self, path)


def plan(
    model: nn.Module,
    *inputs: Any,
    ratios: Mapping[str, float] | float | None = None,
    train: facts.Trains = None,
    device: str = "cpu",
    world_size: int | None = None,
    sharding: str | None = None,
    optimizer_states: int = 2,
    **named_inputs: Any,
) -> Plan:
    """Predicts the memory of one training step. Nothing is allocated, no weight is touched.

    Inputs are tensors (of any device, the meta device too) or shapes. A transformed model is planned at `ratios`, by
    default those of its table; any other as eager would run it. `train` says which parameters are trained: "all",
    "norm", a function of name and parameter, or by default those that require gradients. What lies on the meta device
    is planned for `device`.

    `world_size` and `sharding` ("none", "optimizer" or "full") ask for what one of several ranks holds, given its own
    batch as inputs and an optimizer with so many `optimizer_states` per parameter: `plan.rank`.
    """
    model = behind_door(model)
    if world_size is None and sharding is not None:
        raise ValueError("sharding is over ranks: give world_size too")
    found = facts.step(model, inputs, named_inputs, ratios, train, device=device)
    transformed = is_transformed(model)
    used = dict(rewrite_of(model).table) if transformed else {}
    if ratios is not None:
        used = dict.fromkeys(used, ratios) if isinstance(ratios, (int, float)) else used | dict(ratios)
    rows = [
        PlanRow(
            *(row.layer, row.operation, row.shape, row.dtype, used.get(row.layer), row.dense_bytes, row.held_bytes),
            *(row.held_bytes / max(found.saved_bytes, 1), row.handled, row.reason, row.source),
        )
        for row in found.rows
    ]
    shapes = ", ".join(
        "x".join(map(str, x.shape if isinstance(x, Tensor) else x))
        for x in tree_leaves((inputs, named_inputs), is_leaf=facts.is_shape)
        if isinstance(x, Tensor) or facts.is_shape(x)
    )
    rank = None
    if world_size is not None:
        part = transformed_part(model) if transformed else unwrapped(model)
        chosen = trains(part, train)
        rank = rank_memory(part, chosen, found.saved_bytes, world_size, sharding or "none", optimizer_states)
    return Plan(
        *(type(unwrapped(model)).__name__, shapes, transformed, rows, found.layers, used, found.saved_bytes),
        *(found.timeline, found.forward_operations, rank),
    )
