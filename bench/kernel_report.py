"""Tables and plots of the kernel benchmark, made from its rows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common import MIB, Row
from tabulate import tabulate

Key = tuple[str, int, str]  # provider, elements, metric
BUSY_CORES = 0.1
HEADERS = (
    "elements",
    "provider",
    "memory",
    "compress",
    "decompress",
    "together (p20-p80)",
    "copies",
    "clones",
    "vs published",
    "GB/s",
    "transient MiB",
)


class Group:
    """The rows of one dtype, ratio and kind of values."""

    def __init__(self, rows: list[Row]) -> None:
        self.case = rows[0].case
        self.environment = rows[0].environment
        self.rows: dict[Key, Row] = {(r.provider, r.case["elements"], r.metric): r for r in rows}
        self.providers = list(dict.fromkeys(r.provider for r in rows if r.p50 is not None))
        self.elements = sorted({r.case["elements"] for r in rows})
        self.notes = sorted({f"{r.provider}: {r.note}" for r in rows if r.note})
        for elements in self.elements:
            busy = max(r.environment.busy_cores for r in rows if r.case["elements"] == elements)
            if busy > BUSY_CORES:
                self.notes.append(f"{power(elements)}: unreliable, other processes kept {busy:.1f} cores busy")

    @property
    def title(self) -> str:
        return f"{self.case['dtype']}, ratio {self.case['ratio']:g}, {self.case['values']} values"

    def p50(self, provider: str, elements: int, metric: str) -> float | None:
        found = self.rows.get((provider, elements, metric))
        return found.p50 if found else None

    def in_units_of(self, yardstick: str, provider: str, elements: int) -> float | None:
        unit, time = self.p50(yardstick, elements, "together"), self.p50(provider, elements, "together")
        return time / unit if unit and time else None


def groups(rows: list[Row]) -> list[Group]:
    by_case: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row.case["values"], row.case["dtype"], row.case["ratio"]), []).append(row)
    return [Group(members) for members in by_case.values()]


def tables(rows: list[Row]) -> str:
    parts = []
    for group in groups(rows):
        where = group.environment
        head = f"{group.title} | {where.device}, {where.instruction_set}, {where.threads} threads, torch {where.torch}"
        lines = [
            table_line(group, provider, elements)
            for elements in group.elements
            for provider in group.providers
            if group.p50(provider, elements, "together") is not None
        ]
        parts.append("\n".join([head, tabulate(lines, HEADERS, stralign="right", disable_numparse=True), *group.notes]))
    return "\n\n".join(parts)


def table_line(group: Group, provider: str, elements: int) -> list[str]:
    def cell(metric: str, show: Callable[[float], str]) -> str:
        return optional(group.p50(provider, elements, metric), show)

    together = group.rows[provider, elements, "together"]
    assert together.p50 and together.p20 and together.p80  # noqa: PT018
    slower = group.in_units_of("published", provider, elements)
    return [
        power(elements),
        provider,
        together.memory,
        cell("compress", duration),
        cell("decompress", duration),
        f"{duration(together.p50)} ({duration(together.p20)}-{duration(together.p80)})",
        optional(group.in_units_of("copy", provider, elements), "{:.2f}".format),
        optional(group.in_units_of("clone", provider, elements), "{:.2f}".format),
        optional(slower and 1 / slower, "{:.1f}x".format),
        cell("bandwidth", "{:.1f}".format),
        cell("transient", lambda size: f"{size / MIB:.2f}"),
    ]


def power(elements: int) -> str:
    return f"2^{elements.bit_length() - 1}"


def optional(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def plot(rows: list[Row], path: Path) -> None:
    """Time per element, and the same in copies, against size: a line of two panels for each group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(rows)
    names = list(dict.fromkeys(name for group in found for name in group.providers))
    colours = {name: pyplot.get_cmap("tab10")(i % 10) for i, name in enumerate(names)}
    figure, axes = pyplot.subplots(len(found), 2, figsize=(13, 4.6 * len(found)), squeeze=False, layout="constrained")
    for group, (left, right) in zip(found, axes, strict=True):
        for name in group.providers:
            style = {"color": colours[name], "label": name, "marker": "o", "markersize": 4}
            style["linestyle"] = "--" if name in ("copy", "clone") else "-"
            timed = [group.rows[name, n, "together"] for n in group.elements if group.p50(name, n, "together")]
            sizes = [row.case["elements"] for row in timed]
            low, mid, high = (
                [getattr(row, q) / n * 1e9 for row, n in zip(timed, sizes, strict=True)] for q in ("p20", "p50", "p80")
            )
            left.plot(sizes, mid, **style)
            left.fill_between(sizes, low, high, color=colours[name], alpha=0.15, linewidth=0)
            copies = [(n, group.in_units_of("copy", name, n)) for n in sizes]
            right.plot(*zip(*[point for point in copies if point[1]], strict=True), **style)
        left.set(title=group.title, ylabel="ns per element, p50 and p20-p80")
        right.set(title=f"{group.title}, in copies", ylabel="time / time of a copy")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("elements")
            panel.grid(which="major", alpha=0.3)
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
