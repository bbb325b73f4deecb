"""A plan for people and for other programs: table, JSON, CSV, and a picture. `page` makes the HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon_fx import tables

if TYPE_CHECKING:
    from surgeon_fx.planner.plan import Plan, PlanRow

MIB = 1 << 20
MOST_GROUPS = 20  # lines of a table
EAGER, HELD, LIVE, PEAK, BACKWARD = "#c9d7e8", "#3b6ea5", "#3b6ea5", "#b3412e", "#faf6f0"


def table(plan: Plan) -> str:
    """Totals, then what is held, largest first: by tensor, by group or by stage, whichever is the finest that fits."""
    groups = sorted(folded(plan.rows), key=lambda group: -held_bytes(group[1]))
    shown = groups if len(groups) <= MOST_GROUPS else groups[: MOST_GROUPS - 1]
    rest = [row for _, rows in groups[len(shown) :] for row in rows]
    lines = [cells(name, rows, plan) for name, rows in shown]
    if rest:
        lines.append(cells(f"{len(groups) - len(shown)} more", rest, plan))
    lines.append(cells("total", plan.rows, plan))
    what = "rewritten" if plan.transformed else "eager"
    head = [f"{plan.model} at {plan.inputs}, {what}", totals(plan)]
    if plan.rank is not None:
        head.append(str(plan.rank))
    return "\n".join([*head, tables.table(lines, headers="keys")])


def totals(plan: Plan) -> str:
    """The three accountings on one line."""
    mask = plan.paper_cache_bytes_with_mask
    masked = f" ({mib(mask)} with masks)" if mask != plan.paper_cache_bytes else ""
    eager = f", eager {mib(plan.eager_bytes)}" if plan.transformed else ""
    return (
        f"MiB: paper's count {mib(plan.paper_cache_bytes)}{masked}; saved {mib(plan.saved_bytes)}{eager}; "
        f"peak {mib(plan.peak_bytes)} in {peak_at(plan) or 'nothing'}"
    )


def mib(size: int) -> str:
    return f"{size / MIB:.2f}" if size < MIB else f"{size / MIB:.1f}"


def peak_at(plan: Plan) -> str:
    """Where the peak is, in words."""
    when, _, layer = plan.peak_at.partition(" ")
    return f"{when} of {layer}" if layer else when


def shape_text(row: PlanRow) -> str:
    return "x".join(map(str, row.shape)) or "scalar"


def groups_of(names: Iterable[str]) -> dict[str, str]:
    """The group that a table puts each layer in: its name up to the first number that tells it from a neighbour."""
    names = list(names)
    siblings: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                siblings.setdefault(".".join(parts[:i]), set()).add(part)

    def group(name: str) -> str:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and len(siblings[".".join(parts[:i])]) > 1:
                return ".".join(parts[: i + 1])
        return name

    return {name: group(name) for name in names}


def _stages_of(groups: dict[str, str]) -> dict[str, str]:
    """Neighbouring groups as one: `layer1.0` to `layer1.2` is `layer1.[0-2]`; other layers by what they are part of."""
    numbers: dict[str, list[int]] = {}
    for group in groups.values():
        prefix, _, last = group.rpartition(".")
        if last.isdigit():
            numbers.setdefault(prefix, []).append(int(last))

    def stage(group: str) -> str:
        prefix, _, last = group.rpartition(".")
        if last.isdigit():
            low, high = min(numbers[prefix]), max(numbers[prefix])
            return f"{prefix}.[{low}-{high}]".removeprefix(".") if low < high else group
        return prefix or group

    return {name: stage(group) for name, group in groups.items()}


def folded(rows: list[PlanRow]) -> list[tuple[str, list[PlanRow]]]:
    names = list(dict.fromkeys(row.layer for row in rows))
    if len(rows) <= MOST_GROUPS:
        return [(f"{row.layer or '(model)'} {shape_text(row)}", [row]) for row in rows]
    groups = groups_of(names)
    stages = _stages_of(groups)
    tops = {name: stages[name].partition(".")[0] for name in names}
    found: dict[str, list[PlanRow]] = {}
    for level in (dict(zip(names, names, strict=True)), groups, stages, tops):
        found = {}
        for row in rows:
            found.setdefault(level[row.layer] or "(model)", []).append(row)
        if len(found) <= MOST_GROUPS:
            break
    return list(found.items())


def held_bytes(rows: Iterable[PlanRow]) -> int:
    return sum(row.held_bytes for row in rows)


def cells(name: str, rows: list[PlanRow], plan: Plan) -> dict[str, str]:
    dense, held = sum(row.dense_bytes for row in rows), held_bytes(rows)
    found = {"where": name, "tensors": str(len(rows))}
    if plan.transformed:
        used = [row.ratio for row in rows if row.ratio is not None]
        low, high = (f"{100 * f(used, default=0):.0f}" for f in (min, max))
        found["pruned %"] = "" if not used else low if low == high else f"{low}-{high}"
        found["eager MiB"] = mib(dense)
    found["held MiB"] = mib(held)
    return found | {"share": f"{100 * held / max(plan.saved_bytes, 1):.1f} %"}


def to_dict(plan: Plan) -> dict[str, Any]:
    """Everything a plan knows."""
    return {
        "model": plan.model,
        "inputs": plan.inputs,
        "transformed": plan.transformed,
        "paper_cache_bytes": plan.paper_cache_bytes,
        "paper_cache_bytes_with_mask": plan.paper_cache_bytes_with_mask,
        "paper_norm_bytes": plan.paper_norm_bytes,
        "paper_largest_bytes": plan.paper_largest_bytes,
        "saved_bytes": plan.saved_bytes,
        "eager_bytes": plan.eager_bytes,
        "peak_bytes": plan.peak_bytes,
        "peak_at": plan.peak_at,
        "forward_operations": plan.forward_operations,
        "ratios": plan.ratios,
        "rank": None if plan.rank is None else asdict(plan.rank) | {"total": plan.rank.total},
        "rows": [asdict(row) for row in plan.rows],
        "layers": [asdict(layer) | {"bytes": layer.bytes} for layer in plan.layers],
        "timeline": [{"where": where, "live_bytes": live} for where, live in plan.timeline],
    }


def to_json(plan: Plan, path: str | Path | None = None) -> str:
    """Everything a plan knows, as JSON."""
    return written(json.dumps(to_dict(plan)) + "\n", path)


def to_html(plan: Plan, path: str | Path | None = None) -> str:
    """One page that needs nothing else: memory along the network, eager against held, and the peak of the step."""
    from surgeon_fx.planner.page import page

    return written(page(plan), path)


def to_csv(plan: Plan, path: str | Path | None = None) -> str:
    """The rows, in network order."""
    out = io.StringIO()
    fields = ("layer", "operation", "shape", "dtype", "ratio", "dense_bytes", "held_bytes", "share")
    writer = csv.DictWriter(out, [*fields, "handled", "reason", "source"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) | {"shape": shape_text(row)} for row in plan.rows)
    return written(out.getvalue(), path)


def written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def drawn(plan: Plan) -> tuple[list[PlanRow], str]:
    """The rows that a picture shows, in network order, and what it says about the others, too small to see."""
    least = max((row.dense_bytes for row in plan.rows), default=0) / 1000
    large = [row for row in plan.rows if row.dense_bytes >= least]
    small = held_bytes(row for row in plan.rows if row.dense_bytes < least)
    left_out = len(plan.rows) - len(large)
    return large, f"{left_out} small tensors, {mib(small)} MiB together, are left out" if left_out else ""


def is_steep(rows: list[PlanRow]) -> bool:
    """Whether most bars would be too low to read next to the largest: a square-root scale then."""
    sizes = sorted(row.dense_bytes for row in rows)
    return bool(sizes) and sizes[len(sizes) // 2] < sizes[-1] / 20


def stretches(rows: list[PlanRow]) -> list[tuple[str, int, int]]:
    """Rows in network order as stages: name, first row, and the one after its last."""
    stages = _stages_of(groups_of(row.layer for row in rows))
    found: list[tuple[str, int, int]] = []
    at = 0
    for name, members in groupby(stages[row.layer] for row in rows):
        size = len(list(members))
        found.append((name.partition(".[")[0], at, at + size))
        at += size
    last = {name: name.rpartition(".")[2] for name in dict.fromkeys(name for name, _, _ in found)}
    short = {name: end for name, end in last.items() if list(last.values()).count(end) == 1}
    return [(short.get(name, name), begin, end) for name, begin, end in found]


def thinned(timeline: list[tuple[str, int]], most: int = 1100) -> list[tuple[int, str, int]]:
    """Live bytes with at most two operations per bucket, its lowest and its highest: no peak is lost."""
    points = [(i, where, live) for i, (where, live) in enumerate(timeline)]
    size = math.ceil(len(points) / most) if points else 1
    if size <= 2:
        return points
    kept: list[tuple[int, str, int]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[2]), max(bucket, key=lambda p: p[2])})
    return kept


def peak_index(plan: Plan) -> int:
    return max(range(len(plan.timeline)), key=lambda i: plan.timeline[i][1], default=0)


def plot(plan: Plan, path: str | Path) -> None:
    """The two panels of the page as a picture; the file's ending says which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    bars, line = figure.subplots(2, 1)
    rows, left_out = drawn(plan)
    places = range(len(rows))
    bars.bar(places, [row.dense_bytes / MIB for row in rows], width=0.9, color=EAGER, label="eager")
    bars.bar(places, [row.held_bytes / MIB for row in rows], width=0.9, color=HELD, label="held")
    long = [one for one in stretches(rows) if one[2] - one[1] > max(len(rows) / 30, 1)]
    bars.set_xticks([(start + end - 1) / 2 for _, start, end in long], [name for name, _, _ in long], fontsize=8)
    if is_steep(rows):
        bars.set_yscale("function", functions=(lambda y: abs(y) ** 0.5, lambda y: y**2))
    bars.set_ylabel("MiB per saved tensor" + (", square-root scale" if is_steep(rows) else ""), fontsize=8)
    bars.set_xlabel(left_out, fontsize=8)
    bars.legend(frameon=False, loc="upper left")  # "best" may take long, and warns
    points = thinned(plan.timeline)
    line.plot([i for i, _, _ in points], [live / MIB for _, _, live in points], color=LIVE, linewidth=1)
    line.axhline(plan.saved_bytes / MIB, color="#889", linestyle="--", linewidth=0.8)
    line.axvspan(plan.forward_operations, max(len(plan.timeline), 1), color=BACKWARD, zorder=0)
    peak = peak_index(plan)
    label = f"peak {mib(plan.peak_bytes)} MiB, {peak_at(plan)}"
    side = "right" if peak > len(plan.timeline) / 2 else "left"
    line.plot([peak], [plan.peak_bytes / MIB], "o", color=PEAK)
    line.annotate(label, (peak, plan.peak_bytes / MIB), (0, 6), textcoords="offset points", ha=side, color=PEAK)
    line.margins(y=0.12)
    line.set_xlabel("operations, forward then backward")
    line.set_ylabel("MiB live")
    for axis in (bars, line):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{plan.model} at {plan.inputs}", fontsize=10)
    figure.savefig(path, dpi=150)
