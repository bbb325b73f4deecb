"""Tables of errors and costs, from rows alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from common import MIB, Row

from surgeon_fx.adapt import METHODS

SHORT = {
    "gaussian_noise": "Gauss",
    "shot_noise": "Shot",
    "impulse_noise": "Impul",
    "defocus_blur": "Defoc",
    "glass_blur": "Glass",
    "motion_blur": "Moti",
    "zoom_blur": "Zoom",
    "snow": "Snow",
    "frost": "Frost",
    "fog": "Fog",
    "brightness": "Brigh",
    "contrast": "Contr",
    "elastic_transform": "Elast",
    "pixelate": "Pixel",
    "jpeg_compression": "Jpeg",
}
COSTS = {"paper_cache": "paper cache MiB", "held": "held MiB", "peak": "peak MiB", "reserved": "reserved MiB"}


class Line(NamedTuple):
    """What one line of a table is about: a method with its options at a learning rate."""

    method: str
    options: str
    lr: float | None


def line_of(row: Row) -> Line:
    return Line(row.provider, json.dumps(row.case["options"], sort_keys=True), row.case["lr"])


def settings(rows: Iterable[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Rows by what they share."""
    found: dict[str, tuple[dict[str, Any], list[Row]]] = {}
    for row in rows:
        setting = row.case["setting"]
        found.setdefault(json.dumps(setting, sort_keys=True), (setting, []))[1].append(row)
    return list(found.values())


def text(rows: Sequence[Row]) -> str:
    """Every setting's tables."""
    return "\n\n".join(_setting_text(setting, own) for setting, own in settings(rows))


def _setting_text(setting: dict[str, Any], rows: list[Row]) -> str:
    here = rows[0].environment
    what = [f"severity {setting['severity']}"] if setting["severity"] else []
    what += [f"{setting['split']} split"] if setting["split"] else []
    what += [f"{setting['limit']} images each"] if setting["limit"] else []
    what += ["in random order"] if setting["order"] == "random" else []
    what += [f"{setting['stream']} stream"] if "stream" in setting else []
    what += [f"{setting['rounds']} rounds"] if "rounds" in setting else []
    what += [f"a window of {setting['window']}"] if "window" in setting else []
    what += ["shared saves"] if setting.get("share_saves") else []
    what += [f"exact saves in {setting['exact_saves']}"] if "exact_saves" in setting else []
    title = (
        f"{setting['model']} ({setting['weights']}) on {setting['data']}, {', '.join(what)}, batches of "
        f"{setting['batch']}; {here.device}, {here.threads} threads"
    )
    parts = [title, errors_table(setting, rows), rounds_table(setting, rows), selection_table(rows), costs_table(rows)]
    return "\n\n".join(part for part in parts if part)


def labels(lines: Iterable[Line]) -> dict[Line, str]:
    """A name for each line: the method, and those options in which lines of one method differ."""
    lines = list(lines)
    found = {}
    for line in lines:
        mine = json.loads(line.options)
        others = [json.loads(other.options) for other in lines if other.method == line.method]
        differing = [f"{key} {mine[key]}" for key in mine if any(other.get(key) != mine[key] for other in others)]
        found[line] = " ".join([line.method, *differing])
    return found


def ordered(rows: Iterable[Row]) -> list[Line]:
    """The lines of some rows, methods in their usual order."""
    known = list(METHODS)
    lines = dict.fromkeys(line_of(row) for row in rows)
    return sorted(lines, key=lambda line: known.index(line.method) if line.method in known else len(known))


def by_seed(rows: Iterable[Row], line: Line) -> dict[int, dict[str, float]]:
    """Errors of one line: seed, corruption, percent."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.metric == "error" and line_of(row) == line and row.p50 is not None:
            found.setdefault(row.case["seed"], {})[row.case["corruption"]] = row.p50
    return found


def errors_table(setting: dict[str, Any], rows: list[Row]) -> str:
    """Online error in percent (or mIoU), by corruption; a mean only where a seed has been through all of them."""
    from tabulate import tabulate

    errors = [row for row in rows if row.metric == "error"]
    if not errors:
        return ""
    names = setting["corruptions"]
    lines, table, seeds = ordered(errors), [], set()
    title = labels(lines)
    for line in lines:
        found = by_seed(errors, line)
        seeds |= set(found)
        cells = {"method": title[line], "lr": "" if line.lr is None else f"{line.lr:g}"}
        for name in names:
            values = [shown(setting, one[key]) for one in found.values() for key in one if base(key) == name]
            cells[SHORT.get(name, name)] = f"{statistics.fmean(values):.1f}" if values else ""
        every = len(names) * setting.get("rounds", 1)
        means = [shown(setting, statistics.fmean(one.values())) for one in found.values() if len(one) == every]
        cells["Mean"] = f"{statistics.fmean(means):.2f}" if means else ""
        if len(means) > 1:
            cells["Mean"] += f" +- {statistics.stdev(means):.2f}"
        table.append(cells)
    what = "mIoU" if setting["split"] else "error"
    which = f"seed {min(seeds)}" if len(seeds) == 1 else f"mean over seeds {', '.join(map(str, sorted(seeds)))}"
    note = f"online {what} in %, before each update; {which}"
    return "\n".join([tabulate(table, headers="keys", disable_numparse=True), note])


def base(corruption: str) -> str:
    """A corruption's name without its round."""
    return corruption.partition("@")[0]


def shown(setting: dict[str, Any], error: float) -> float:
    """What a table has of an error: for pixels, mIoU."""
    return 100 - error if setting["split"] else error


def rounds_table(setting: dict[str, Any], rows: list[Row]) -> str:
    """The mean over the domains, round by round."""
    from tabulate import tabulate

    errors = [row for row in rows if row.metric == "error"]
    if setting.get("rounds", 1) == 1 or not errors:
        return ""
    lines, table = ordered(errors), []
    title = labels(lines)
    for line in lines:
        by_round: dict[int, list[float]] = {}
        for one in by_seed(errors, line).values():
            for name, error in one.items():
                by_round.setdefault(int(name.partition("@")[2] or 1), []).append(shown(setting, error))
        cells = {"method": title[line], "lr": "" if line.lr is None else f"{line.lr:g}"}
        table.append(cells | {str(number): f"{statistics.fmean(by_round[number]):.1f}" for number in sorted(by_round)})
    return "\n".join([tabulate(table, headers="keys", disable_numparse=True), "mean over the domains, round by round"])


def selection_table(rows: list[Row]) -> str:
    """Errors that learning rates were chosen by."""
    from tabulate import tabulate

    found: dict[str, dict[float, list[float]]] = {}
    names: dict[str, None] = {}
    chosen = [row for row in rows if row.metric == "selection"]
    title = labels(line._replace(lr=None) for line in ordered(chosen))
    for row in chosen:
        if row.p50 is not None:
            rates = found.setdefault(title[line_of(row)._replace(lr=None)], {})
            rates.setdefault(row.case["lr"], []).append(row.p50)
            names[row.case["corruption"]] = None
    if not found:
        return ""
    every = sorted({lr for rates in found.values() for lr in rates})
    table, ends = [], False
    for label in dict.fromkeys(title.values()):
        means = {lr: statistics.fmean(values) for lr, values in found[label].items()}
        best = min(sorted(means), key=lambda lr: means[lr])
        at_end = len(means) > 1 and best in (min(means), max(means))
        ends |= at_end
        mark = " *!" if at_end else " *"
        cells = {f"{lr:g}": f"{means[lr]:.2f}{mark if lr == best else ''}" if lr in means else "" for lr in every}
        table.append({"method": label} | cells)
    note = f"mean error in % on {', '.join(SHORT.get(name, name) for name in names)} by learning rate; * chosen"
    note += "; ! at an end of its grid: one beyond may do better, or fail later in the stream" if ends else ""
    return "\n".join([tabulate(table, headers="keys", disable_numparse=True), note])


def costs_table(rows: list[Row]) -> str:
    """What a call costs; in brackets, over full tuning in eager."""
    from tabulate import tabulate

    costs = {(line_of(row), row.metric): row for row in rows if row.metric in (*COSTS, "batch", "gflops")}
    if not costs:
        return ""
    lines = ordered(costs[key] for key in costs)
    title = labels(lines)
    full = next((line for line in lines if line.method == "full"), None)

    def cell(line: Line, metric: str) -> str:
        row = costs.get((line, metric))
        base = costs.get((full, metric)) if full else None
        if row is None or row.p50 is None:
            return ""
        times = f" ({row.p50 / base.p50:.2f})" if base and base.p50 and metric in ("held", "peak", "batch") else ""
        if metric == "batch":
            return f"{row.p50:.3f} [{row.p20:.3f} {row.p80:.3f}]{times}"
        return f"{row.p50:.2f}" if metric == "gflops" else f"{row.p50 / MIB:.1f}{times}"

    columns = {**COSTS, "batch": "s per batch", "gflops": "GFLOPs"}
    there = [metric for metric in columns if any((line, metric) in costs for line in lines)]
    table = [{"method": title[line]} | {columns[metric]: cell(line, metric) for metric in there} for line in lines]
    timed = next((row for row in costs.values() if row.metric == "batch"), None)
    notes = [f"a call on {'x'.join(map(str, next(iter(costs.values())).case['input']))}"]
    if timed is not None:
        notes.append(f"p50 [p20 p80] of {timed.repetitions} calls in turn")
    if full is not None:
        notes.append("in brackets, over full")
    return "\n".join([tabulate(table, headers="keys", disable_numparse=True), "; ".join(notes)])
