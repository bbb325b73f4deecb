"""A plan as one HTML page that needs nothing else: memory along the network, eager against held, and the peak."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from surgeon_fx.planner import report
from surgeon_fx.planner.report import MIB, mib

if TYPE_CHECKING:
    from surgeon_fx.planner.plan import Plan, PlanRow

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1100, 300, 64, 16, 28, 44  # of a panel, and its margins
LABEL_WIDTH = 6.5  # of a letter, about
Height = Callable[[float], float]  # where a number of bytes lies


def page(plan: Plan) -> str:
    """The page. Bars are SVG in it and show without JavaScript, which adds the tooltips."""
    title = f"{plan.model} at {plan.inputs}, {'rewritten' if plan.transformed else 'eager'}"
    totals = [("paper's count", plan.paper_cache_bytes), ("saved for backward", plan.saved_bytes)]
    totals += [("eager would save", plan.eager_bytes)] if plan.transformed else []
    totals += [("peak of the step", plan.peak_bytes)]
    attach = f"attach({json.dumps(tooltips(plan))});".replace("<", "\\u003c")
    return document(
        title, f"<h1>{escape(title)}</h1>{cards(totals)}{panels(plan)}", f"<script>{SCRIPT}{attach}</script>"
    )


def document(title: str, body: str, scripts: str = "", style: str = "") -> str:
    """A whole page in the style of a plan."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{STYLE}{style}</style></head>\n<body>{body}<div id="tip" hidden></div>\n{scripts}</body></html>\n'
    )


def cards(totals: Iterable[tuple[str, int]]) -> str:
    found = "".join(f"<div><b>{mib(size)} MiB</b>{escape(name)}</div>" for name, size in totals)
    return f'<div class="cards">{found}</div>'


def panels(plan: Plan) -> str:
    """Where the peak is, both pictures and the table."""
    return (
        f"<p>Peak in {escape(report.peak_at(plan) or 'nothing')}.</p>\n{_bar_panel(plan)}\n"
        f"{panel('Live activations, operation by operation', 'line', plan.peak_bytes, lambda y: _line(plan, y))}\n"
        f"<h2>Largest first</h2>{_table(plan)}"
    )


def tooltips(plan: Plan) -> dict[str, Any]:
    """What the script needs to tell what lies under the pointer."""
    points = [[i, where, live] for i, where, live in report.thinned(plan.timeline)]
    data = {"points": points, "operations": len(plan.timeline), "forward": plan.forward_operations}
    return data | {"left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH}


def _table(plan: Plan) -> str:
    groups = sorted(report.folded(plan.rows), key=lambda group: -report.held_bytes(group[1]))[: report.MOST_GROUPS]
    lines = [report.cells(name, rows, plan) for name, rows in [*groups, ("total", plan.rows)]]
    head = "".join(f"<th>{escape(key)}</th>" for key in lines[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line.values())}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def panel(title: str, css: str, top_bytes: int, body: Callable[[Height], str], root: bool = False) -> str:
    """Title, grid and scale in MiB, and what `body` draws on it."""
    top = max(top_bytes, 1) * 1.08
    power = 0.5 if root else 1.0

    def y(size: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - (size / top) ** power), 2)

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick * MIB)}" y2="{y(tick * MIB)}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(tick * MIB) + 4}" text-anchor="end">{tick:g}</text>'
        for tick in _ticks(top / MIB, root)
    )
    return (
        f'<h2>{escape(title)}</h2><svg class="{css}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{grid}'
        f'<text class="tick" x="{LEFT - 8}" y="14" text-anchor="end">MiB</text>{body(y)}</svg>'
    )


def _ticks(top: float, root: bool) -> list[float]:
    """Round numbers from 0 to `top`, evenly spaced where the scale is."""
    if root:
        digits, found = math.floor(math.log10(top)), [0.0]
        for tick in (k * 10.0**n for n in range(digits - 3, digits + 1) for k in (1, 2, 5)):
            if math.sqrt(tick / top) - math.sqrt(found[-1] / top) > 0.12 and tick <= top:
                found.append(tick)
        return found
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(k for k in (1, 2, 2.5, 5, 10) if top / (step * k) <= 7)
    return [step * i for i in range(math.floor(top / step) + 1)]


def _bar_panel(plan: Plan) -> str:
    rows, left_out = report.drawn(plan)
    root = report.is_steep(rows)
    title = "Tensors saved for backward, in network order" + (" (square-root scale)" if root else "")
    drawing = panel(title, "bars", max((r.dense_bytes for r in rows), default=0), lambda y: _bars(plan, rows, y), root)
    colours = (
        '<i class="eager"></i> eager <i class="held"></i> held' if plan.transformed else '<i class="held"></i> held'
    )
    return f'{drawing}<p class="key">{colours}<span>{escape(left_out)}</span></p>'


def _bars(plan: Plan, rows: list[PlanRow], y: Height) -> str:
    step = min((WIDTH - LEFT - RIGHT) / max(len(rows), 1), 40)
    width = round(max(step * 0.85, step - 2), 3)
    base, parts = y(0), []
    for i, row in enumerate(rows):
        x, dense, held = round(LEFT + i * step, 2), y(row.dense_bytes), y(row.held_bytes)
        parts.append(
            f'<g class="bar"><title>{escape(_details(plan, row))}</title>'
            f'<rect class="reach" x="{x}" y="{TOP}" width="{round(step, 3)}" height="{round(base - TOP, 2)}"/>'
            f'<rect class="eager" x="{x}" y="{dense}" width="{width}" height="{round(base - dense, 2)}"/>'
            f'<rect class="held" x="{x}" y="{held}" width="{width}" height="{round(base - held, 2)}"/></g>'
        )
    free = 0.0
    for name, start, end in report.stretches(rows):
        left, right = LEFT + start * step, LEFT + end * step - 1
        x, half = (left + right) / 2, LABEL_WIDTH * len(name) / 2
        if right - left > 12:
            parts.append(f'<line class="stage" x1="{left:.1f}" x2="{right:.1f}" y1="{base + 5}" y2="{base + 5}"/>')
            if x - half > free and x + half < WIDTH:  # labels where there is room for them
                parts.append(f'<text class="tick middle" x="{x:.1f}" y="{base + 20}">{escape(name)}</text>')
                free = x + half + 6
    return "".join(parts)


def _details(plan: Plan, row: PlanRow) -> str:
    ratio = f", {100 * row.ratio:.0f} % pruned" if plan.transformed and row.ratio is not None else ""
    lines = [
        f"{row.layer or '(model)'}",
        f"{row.operation}, {report.shape_text(row)} {row.dtype}{ratio}",
        f"eager {row.dense_bytes:,} bytes, held {row.held_bytes:,} bytes ({100 * row.share:.1f} %)",
        row.reason,
    ]
    return "\n".join(line for line in lines if line)


def _line(plan: Plan, y: Height) -> str:
    if not plan.timeline:
        return ""
    scale = (WIDTH - LEFT - RIGHT) / max(len(plan.timeline) - 1, 1)
    points = [(LEFT + i * scale, y(live)) for i, _, live in report.thinned(plan.timeline)]
    path = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
    turn, end, base, level = LEFT + plan.forward_operations * scale, WIDTH - RIGHT, y(0), y(plan.saved_bytes)
    peak = report.peak_index(plan)
    x, top = LEFT + peak * scale, y(plan.timeline[peak][1])
    label = f"peak {mib(plan.peak_bytes)} MiB, {report.peak_at(plan)}"
    anchor, at = ("end", x - 8) if x > WIDTH / 2 else ("start", x + 8)
    parts = [
        f'<polygon class="area" points="{LEFT},{base} {path} {points[-1][0]:.1f},{base}"/>',
        f'<polyline class="live" points="{path}"/>',
        f'<text class="tick middle" x="{(LEFT + min(turn, end)) / 2:.1f}" y="{base + 20}">forward</text>',
        f'<line class="saved" x1="{LEFT}" x2="{end}" y1="{level}" y2="{level}"/>',
        f'<text class="tick halo" x="{LEFT + 6}" y="{level - 5}">saved for backward {mib(plan.saved_bytes)}</text>',
        f'<circle class="peak" cx="{x:.1f}" cy="{top}" r="4.5"/>',
        f'<text class="peak-label halo" x="{at:.1f}" y="{top - 8}" text-anchor="{anchor}">{escape(label)}</text>',
    ]
    if plan.forward_operations < len(plan.timeline):
        shade = f'x="{turn:.1f}" y="{TOP}" width="{end - turn:.1f}" height="{round(base - TOP, 2)}"'
        parts.insert(0, f'<rect class="backward" {shade}/>')
        parts.append(f'<text class="tick middle" x="{(turn + end) / 2:.1f}" y="{base + 20}">backward</text>')
    return "".join(parts)


STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }}
h1 {{ font-size: 1.4em; margin: 0 0 .6em; }} h2 {{ font-size: 1em; margin: 1.6em 0 .3em; }}
.cards {{ display: flex; gap: 1em; flex-wrap: wrap; }}
.cards div {{ background: #f4f6f9; border-radius: 6px; padding: .5em 1em; color: #555; }}
.cards b {{ display: block; color: #222; font-size: 1.25em; }}
svg {{ width: 100%; height: auto; display: block; }} svg text {{ font: 12px system-ui, sans-serif; }}
.tick {{ fill: #667; }} .middle {{ text-anchor: middle; }} .grid {{ stroke: #e6e9ee; }}
.halo {{ paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }}
.stage {{ stroke: #b8c2cf; stroke-width: 2; }}
rect.eager {{ fill: {report.EAGER}; }} rect.held {{ fill: {report.HELD}; }} .reach {{ fill: transparent; }}
.bar:hover .reach {{ fill: #0001; }} .backward {{ fill: {report.BACKWARD}; }}
.area {{ fill: {report.EAGER}; opacity: .45; }} .live {{ fill: none; stroke: {report.LIVE}; stroke-width: 1.4; }}
.saved {{ stroke: #889; stroke-dasharray: 4 4; }} .peak {{ fill: {report.PEAK}; }}
svg .peak-label {{ fill: {report.PEAK}; font-weight: 600; }}
.key {{ color: #667; font-size: .85em; margin: .2em 0 0; }} .key span {{ margin-left: 2em; }}
.key i {{ display: inline-block; width: 1em; height: .8em; margin: 0 .2em 0 .6em; }}
i.eager {{ background: {report.EAGER}; }} i.held {{ background: {report.HELD}; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .15em 1.2em .15em 0; text-align: right; }}
th {{ color: #667; font-weight: 500; border-bottom: 1px solid #ccd; }}
th:first-child, td:first-child {{ text-align: left; }} tr:last-child td {{ border-top: 1px solid #ccd; }}
#tip {{ position: fixed; background: #222; color: #fff; font-size: 13px; padding: .4em .7em; border-radius: 4px;
  white-space: pre-line; pointer-events: none; max-width: 32em; }}
"""
SCRIPT = """
const tip = document.getElementById("tip");
function show(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
function attach(plan) {
  for (const bar of document.querySelectorAll(".bar")) {
    const title = bar.querySelector("title"), text = title.textContent;
    title.remove();
    bar.addEventListener("mousemove", event => show(event, text));
    bar.addEventListener("mouseleave", () => { tip.hidden = true; });
  }
  const line = document.querySelector("svg.line");
  line.addEventListener("mousemove", event => {
    if (!plan.points.length) return;
    const box = line.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * plan.width;
    const at = (x - plan.left) / (plan.right - plan.left) * (plan.operations - 1);
    const near = plan.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const when = near[0] < plan.forward ? "forward" : "backward";
    show(event, (near[2] / 1048576).toFixed(2) + " MiB live\\n" + when + " " + (near[1] === when ? "" : near[1]));
  });
  line.addEventListener("mouseleave", () => { tip.hidden = true; });
}
"""
