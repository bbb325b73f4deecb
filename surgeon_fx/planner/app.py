"""The page of `surgeon-fx plan --serve`: a chooser, sliders, and the script that asks the server."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from surgeon_fx.planner.page import HEIGHT, LEFT, RIGHT, SCRIPT, TOP, WIDTH, Height, document, panel
from surgeon_fx.planner.report import mib

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCALES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)  # of a model's usual height and width


def curve_panel(curve: Sequence[tuple[float, int]], ratio: float, saved_bytes: int, eager_bytes: int) -> str:
    """Bytes saved for backward at every ratio, with a mark at the one chosen."""

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value, 1)

    def body(y: Height) -> str:
        base = y(0)
        path = " ".join(f"{x(at)},{y(size)}" for at, size in curve)
        ticks = "".join(
            f'<text class="tick middle" x="{x(i / 10)}" y="{base + 20}">{i / 10:g}</text>' for i in range(10)
        )
        return (
            f'<line class="saved" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(eager_bytes)}" y2="{y(eager_bytes)}"/>'
            f'<text class="tick halo" x="{WIDTH - RIGHT}" y="{y(eager_bytes) - 5}" text-anchor="end">'
            f"eager {mib(eager_bytes)}</text>"
            f'<polyline class="live" points="{path}"/>{ticks}'
            f'<line class="saved" x1="{x(ratio)}" x2="{x(ratio)}" y1="{TOP}" y2="{HEIGHT - TOP}"/>'
            f'<circle class="peak" cx="{x(ratio)}" cy="{y(saved_bytes)}" r="4.5"/>'
        )

    most = max(eager_bytes, *(size for _, size in curve))
    return panel("Saved for backward by ratio", "curve", most, body)


def app_page(names: Sequence[str], model: str, ratio: float) -> str:
    """The page; numbers and pictures come once the server has answered."""
    options = "".join(f'<option value="{escape(name)}">' for name in names)
    body = f"""<h1>Memory of one training step</h1>
<form class="controls" onsubmit="return false">
<label>model <input id="model" list="models" value="{escape(model)}" autocomplete="off" spellcheck="false"></label>
<datalist id="models">{options}</datalist>
<label>ratio <output id="ratio-value"></output>
<input id="ratio" type="range" min="0" max="0.99" step="0.01" value="{ratio}"></label>
<label>batch <output id="batch-value"></output>
<input id="batch" type="range" min="0" max="0" step="1" value="0"></label>
<label>size <output id="size-value"></output>
<input id="size" type="range" min="0" max="0" step="1" value="0"></label>
<label>trains <select id="train"><option value="all">all parameters</option>
<option value="norm">norm layers</option></select></label>
</form>
<p id="state" role="status">starting</p>
<div class="plan">
<div class="cards">
<div><b id="saved">-</b>saved for backward</div><div><b id="share">-</b>of eager's</div>
<div><b id="eager">-</b>eager saves</div><div><b id="peak">-</b>peak of the step</div>
<div><b id="eager-peak">-</b>eager's peak</div></div>
<div id="curve"></div><div id="panels"></div></div>"""
    script = f"{SCRIPT}const scales = {list(SCALES)};{APP_SCRIPT}"
    return document("surgeon-fx plan", body, f"<script>{script}</script>", APP_STYLE)


APP_STYLE = """
.controls { display: grid; grid-template-columns: 2fr 2fr 1.4fr 1.4fr 1fr; gap: 1.2em; align-items: end;
  margin: 1em 0; }
.controls label { color: #555; font-size: .9em; } .controls output { color: #222; font-weight: 600; }
.controls input, .controls select { width: 100%; box-sizing: border-box; font: inherit; }
#state { min-height: 1.5em; margin: .4em 0; color: #667; } #state.error { color: #b3412e; }
body.busy .plan, body.stale .plan { opacity: .4; }
@media (max-width: 760px) { .controls { grid-template-columns: 1fr 1fr; } }
"""
APP_SCRIPT = """
const at = id => document.getElementById(id), state = at("state");
let usual = null, latest = 0;
const mib = bytes => (bytes / 1048576).toFixed(bytes < 1048576 ? 2 : 1) + " MiB";
function size() {
  return usual.size.map(n => Math.max(32, Math.round(n * scales[at("size").value] / 32) * 32));
}
function batch() { return usual.batches[at("batch").value]; }
function label() {
  at("ratio-value").textContent = Number(at("ratio").value).toFixed(2);
  if (usual) {
    at("batch-value").textContent = batch();
    at("size-value").textContent = size().join("x");
  }
}
function say(text, error) { state.textContent = text; state.className = error ? "error" : ""; }
async function ask(path, values) {
  const answer = await fetch(path + "?" + new URLSearchParams(values)), found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
function choice() {
  return { model: at("model").value, ratio: at("ratio").value, batch: batch(), size: size().join("x"),
           train: at("train").value };
}
function totals(found) {
  at("saved").textContent = mib(found.saved);
  at("share").textContent = (100 * found.saved / Math.max(found.eager, 1)).toFixed(1) + " %";
  at("eager").textContent = mib(found.eager);
}
async function attempt(work) {
  const mine = ++latest;
  let failed = false;
  try { await work(() => mine === latest); }
  catch (error) {
    if (mine !== latest) return;
    failed = true;
    say(error.message, true);
  }
  document.body.classList.toggle("stale", failed);
  if (mine === latest) document.body.classList.remove("busy");
}
function full() {
  label();
  if (!usual) return;
  return attempt(async current => {
    document.body.classList.add("busy");
    say("planning " + at("model").value + " at " + batch() + "x" + size().join("x"));
    const found = await ask("/plan", choice());
    if (!current()) return;
    totals(found);
    at("peak").textContent = mib(found.peak);
    at("eager-peak").textContent = mib(found.eager_peak);
    at("curve").innerHTML = found.curve;
    at("panels").innerHTML = found.panels;
    attach(found.tooltips);
    say(found.title + ", ratio " + Number(found.ratio).toFixed(2) + " for every layer");
  });
}
function quick() {
  label();
  if (!usual || document.body.classList.contains("busy")) return;
  const ratio = at("ratio").value;
  ask("/held", choice()).then(found => { if (ratio === at("ratio").value) totals(found); }, () => {});
}
function choose() {
  return attempt(async current => {
    document.body.classList.add("busy");
    usual = null;
    const found = await ask("/model", { model: at("model").value });
    if (!current()) return;
    usual = found;
    at("batch").max = usual.batches.length - 1;
    at("batch").value = usual.batches.indexOf(usual.batch);
    at("size").max = scales.length - 1;
    at("size").value = scales.indexOf(1);
    await full();
  });
}
at("ratio").addEventListener("input", quick);
at("ratio").addEventListener("change", full);
for (const id of ["batch", "size"]) {
  at(id).addEventListener("input", label);
  at(id).addEventListener("change", full);
}
at("train").addEventListener("change", full);
at("model").addEventListener("change", choose);
choose();
"""
