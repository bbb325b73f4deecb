"""Plots of errors along the stream and of SURGEON's ratios, from rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Row
from tta_report import SHORT, Line, by_seed, labels, line_of, ordered, settings

MOST_NAMES = 40  # layers that are named on an axis


def draw(rows: Sequence[Row], where: str) -> list[Path]:
    """Writes the plots of every setting: into a folder (that is there, or ends in /), or `where` begins their names."""
    start = f"{where.rstrip('/')}/" if where.endswith("/") or Path(where).is_dir() else f"{where}_"
    Path(f"{start}errors.png").parent.mkdir(parents=True, exist_ok=True)
    written, found = [], settings(rows)
    for number, (setting, own) in enumerate(found):
        prefix = start if len(found) == 1 else f"{start}{number}_"
        errors = [row for row in own if row.metric == "error"]
        lines = ordered(errors)
        title = labels(lines)
        if lines:
            written.append(_errors(setting, errors, title, Path(f"{prefix}errors.png")))
        for line in lines:
            ratios = [row for row in own if row.metric == "ratios" and line_of(row) == line]
            if ratios:
                name = title[line].replace(" ", "_") + (f"_{line.lr:g}" if _several(lines, line) else "")
                written.append(
                    _ratios(ratios, f"{setting['model']}, {title[line]}", Path(f"{prefix}ratios_{name}.png"))
                )
    return written


def _several(lines: list[Line], line: Line) -> bool:
    """Whether a line has others that differ in the learning rate alone."""
    return sum(other[:2] == line[:2] for other in lines) > 1


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _errors(setting: dict[str, Any], rows: list[Row], title: dict[Line, str], path: Path) -> Path:
    """A line per method over the corruptions: the mean over seeds, and faint, the batches of the first seed."""
    names = setting["corruptions"]
    places = {name: i for i, name in enumerate(names)}
    figure = _figure(max(6.0, 0.75 * len(names) + 2), 4.5)
    axis = figure.add_subplot()
    for line, label in title.items():
        found = by_seed(rows, line)
        known = [name for name in names if any(name in one for one in found.values())]  # of the first round
        means = [statistics.fmean(one[name] for one in found.values() if name in one) for name in known]
        (drawn,) = axis.plot([places[name] for name in known], means, marker="o", markersize=3, label=label)
        for row in rows:
            if line_of(row) == line and row.case["seed"] == min(found) and row.case["corruption"] in places:
                errors = row.case["batch_errors"]
                start = places[row.case["corruption"]] - 0.5
                x = [start + (i + 0.5) / len(errors) for i in range(len(errors))]
                axis.plot(x, errors, color=drawn.get_color(), linewidth=0.6, alpha=0.3)
    axis.set_xticks(range(len(names)), [SHORT.get(name, name) for name in names], rotation=45, ha="right")
    axis.set_ylabel("1 - mIoU, %" if setting["split"] else "error, %")
    axis.set_title(f"{setting['model']} on {setting['data']}, batches of {setting['batch']}", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path


def _ratios(rows: list[Row], title: str, path: Path) -> Path:
    """Layers by batches, of the first seed; a line where a corruption begins."""
    first = min(row.case["seed"] for row in rows)
    rows = sorted((row for row in rows if row.case["seed"] == first), key=lambda row: row.case["position"])
    layers = rows[0].case["layers"]
    columns = [ratios for row in rows for ratios in row.case["ratios"]]
    figure = _figure(9, min(10.0, 2 + 0.12 * len(layers)))
    axis = figure.add_subplot()
    image = axis.imshow(list(zip(*columns, strict=True)), aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, label="share dropped")
    edges, end = [], 0
    for row in rows:
        edges.append(end - 0.5)
        end += len(row.case["ratios"])
    for edge in edges[1:]:
        axis.axvline(edge, color="white", linewidth=0.5)
    axis.set_xticks(edges, [SHORT.get(row.case["corruption"], row.case["corruption"]) for row in rows])
    axis.tick_params(axis="x", rotation=45)
    if len(layers) <= MOST_NAMES:
        axis.set_yticks(range(len(layers)), layers, fontsize=6)
    else:
        axis.set_ylabel("layer")
    axis.set_title(f"{title}: ratios over the stream", fontsize=10)
    figure.savefig(path, dpi=150)
    return path
