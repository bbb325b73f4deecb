"""The memory of every way to adapt one model, side by side: what `bench/memory_plan.py` and `surgeon-fx plan` print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx import zoo
from surgeon_fx.api import ratios as ratio_table
from surgeon_fx.api import transform
from surgeon_fx.commands import answer
from surgeon_fx.config import Config
from surgeon_fx.planner import report
from surgeon_fx.planner.arithmetic import LayerInput
from surgeon_fx.planner.fit import Fit, fit, memory_term
from surgeon_fx.planner.plan import Plan, plan
from surgeon_fx.planner.report import MIB, mib
from surgeon_fx.retained import retained_bytes

METHODS = ("source", "bn_stat", "tent", "full", "static", "surgeon")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
VERIFY_BYTES = 512 * MIB  # about what a step of --verify may keep

# The paper's figures in MiB, at the input each model is meant for. All but SURGEON's follow from shapes.
PUBLISHED: dict[str, dict[str, float]] = {
    "wrn28_10": {"source": 125, "bn_stat": 125, "tent": 1762, "full": 3697, "surgeon": 325},
    "resnext29": {"source": 200, "bn_stat": 200, "tent": 2725, "full": 5403, "surgeon": 820},
    "resnet50": {"source": 196, "bn_stat": 196, "tent": 2714, "full": 5317, "surgeon": 1125},
    "deeplabv3plus_r50": {"source": 301, "bn_stat": 301, "tent": 4646, "full": 9974, "surgeon": 1403},
    "segformer_b5": {"source": 380, "bn_stat": 380, "full": 2793, "surgeon": 380},
}
JETSON_BATCH = 8  # of its table for ResNeXt-29
JETSON = {"source": 8.0, "tent": 109.0, "full": 216.0, "checkpointing": 62.1}
STATIC = ("source", "tent", "full", "checkpointing")


def paper_bytes(method: str, found: Plan) -> int:
    """What the paper's way of counting gives for a method."""
    if method in ("source", "bn_stat"):
        return found.paper_largest_bytes
    if method == "tent":
        return found.paper_norm_bytes
    return checkpointing_bytes(found.layers) if method == "checkpointing" else found.paper_cache_bytes


def checkpointing_bytes(layers: Sequence[LayerInput]) -> int:
    """Checkpointing with a block as the unit: inputs of the blocks before, and every layer input of the one at work."""
    blocks = report.blocks_of(layer.layer for layer in layers)
    units: list[tuple[str, int, int]] = []  # name, first input, all inputs
    for layer in layers:
        block = blocks[layer.layer]
        name = block if block != layer.layer else ""  # the stem and the head are units too
        if units and units[-1][0] == name:
            units[-1] = (name, units[-1][1], units[-1][2] + layer.bytes)
        else:
            units.append((name, layer.bytes, layer.bytes))
    return max(
        (sum(first for _, first, _ in units[:i]) + whole for i, (_, _, whole) in enumerate(units)),
        default=0,
    )


@dataclass(frozen=True)
class Outcome:
    """One method's plan, what the paper counts for it, and what it published."""

    method: str
    title: str
    plan: Plan
    paper_bytes: int
    published_mib: float | None


def build(name: str, dtype: torch.dtype = torch.float32, real: bool = False) -> nn.Module:
    """A model by name, on the meta device where its constructor can do without numbers."""
    if not real:
        try:
            with torch.device("meta"):
                return zoo.create(name).to(dtype)
        except (RuntimeError, NotImplementedError):  # it reads a tensor while it is built
            pass
    return zoo.create(name).to(dtype)


def input_shape(name: str, batch: int | None, size: Sequence[int] | None) -> tuple[int, ...]:
    usual, *rest = zoo.input_shape(name)
    if size:
        rest[-2:] = size if len(size) == 2 else [*size, *size]
    return (batch or usual, *rest)


def rewritten(model: nn.Module) -> nn.Module:
    return transform(model, Config(return_freed_memory=False))


def memory_ratios(layers: Sequence[LayerInput], names: Iterable[str]) -> dict[str, float]:
    """Ratios by the paper's Layer Activation Memory alone: large inputs are pruned most."""
    importance = memory_term(list(layers))
    return {name: 1 - importance.get(name, 1.0) for name in names}


def read_ratios(path: Path) -> dict[str, float]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object of layer names and ratios, got {type(found).__name__}")
    return found


class Study:
    """One model at one input. Plans are made when a method asks for one."""

    def __init__(self, model: nn.Module, x: Tensor, published: Mapping[str, float] | None = None) -> None:
        self.model, self.x, self.published = model, x, published or {}
        self.rewritten = rewritten(model)
        self._source: Plan | None = None

    @property
    def source(self) -> Plan:
        """The forward alone, without gradients, in evaluation mode."""
        if self._source is None:
            before = self.model.training
            self._source = plan(self.model.eval(), self.x, train=lambda name, parameter: False)
            self.model.train(before)
        return self._source

    def outcomes(
        self,
        methods: Sequence[str],
        static: Sequence[float],
        chosen: Mapping[str, float] | None,
        title: str,
        train: str,
    ) -> list[Outcome]:
        """A row per method; `chosen` ratios, with their title, take the place of SURGEON's memory term."""
        found = []
        for method in methods:
            if method in ("source", "bn_stat"):
                name = "Source, no gradients" if method == "source" else "BN-stat, no gradients"
                found.append(self._outcome(method, name, self.source))
            elif method == "tent":
                found.append(self._outcome(method, "TENT, norm layers", plan(self.model, self.x, train="norm")))
            elif method == "full":
                found.append(self._outcome(method, "full tuning", plan(self.model, self.x, train="all")))
            elif method == "static":
                found += [
                    self._outcome(method, f"static {100 * r:g} %", plan(self.rewritten, self.x, ratios=r, train=train))
                    for r in static
                ]
            else:
                used = self.memory_ratios() if chosen is None else chosen
                planned = plan(self.rewritten, self.x, ratios=used, train=train)
                found.append(self._outcome(method, f"SURGEON, {title}", planned))
        return found

    def memory_ratios(self) -> dict[str, float]:
        return memory_ratios(self.source.layers, ratio_table(self.rewritten))

    def _outcome(self, method: str, title: str, found: Plan) -> Outcome:
        return Outcome(method, title, found, paper_bytes(method, found), self.published.get(method))


def methods_table(outcomes: Sequence[Outcome]) -> str:
    from tabulate import tabulate

    rows = []
    for one in outcomes:
        row = {"method": one.title, "paper's count": mib(one.paper_bytes)}
        if any(other.published_mib is not None for other in outcomes):
            star = " *" if one.method == "surgeon" else ""
            row["published"] = "" if one.published_mib is None else f"{one.published_mib:g}{star}"
        rows.append(row | {"saved": mib(one.plan.saved_bytes), "peak": mib(one.plan.peak_bytes)})
        rows[-1]["peak in"] = report.peak_at(one.plan)
    lines = [tabulate(rows, headers="keys", disable_numparse=True), "all in MiB"]
    if any(one.published_mib is not None and one.method == "surgeon" for one in outcomes):
        lines.append("* the paper's ratios depend on gradients, so on data; every other figure follows from shapes")
    return "\n".join(lines)


def largest_table(one: Outcome, most: int = 10) -> str:
    from tabulate import tabulate

    largest = sorted(one.plan.rows, key=lambda row: (-row.held_bytes, -row.dense_bytes))[:most]
    rows = [
        {
            "layer": row.layer or "(model)",
            "saved by": row.operation,
            "shape": report.shape_text(row),
            "pruned %": "" if row.ratio is None else f"{100 * row.ratio:.0f}",
            "eager MiB": mib(row.dense_bytes),
            "held MiB": mib(row.held_bytes),
            "share": f"{100 * row.share:.1f} %",
        }
        for row in largest
    ]
    title = f"the {len(rows)} largest of {len(one.plan.rows)} tensors held: {one.title}"
    return f"{title}\n{tabulate(rows, headers='keys', disable_numparse=True)}"


def ratios_table(ratios: Mapping[str, float]) -> str:
    """Ratios by layer, or by block where layers are many."""
    from tabulate import tabulate

    blocks = report.blocks_of(ratios) if len(ratios) > 2 * report.MOST_GROUPS else {name: name for name in ratios}
    found: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        found.setdefault(blocks[name], []).append(ratio)
    rows = [
        {
            "where": name,
            "layers": len(some),
            "ratio": f"{min(some):.3f}" if min(some) == max(some) else f"{min(some):.3f} to {max(some):.3f}",
        }
        for name, some in found.items()
    ]
    return tabulate(rows, headers="keys", disable_numparse=True)


def all_paper() -> int:
    """Every static figure of the paper against what the shapes give: 0 where all agree to 1 MiB."""
    from tabulate import tabulate

    rows, worst = [], 0.0
    cases = [(name, zoo.input_shape(name), figures) for name, figures in PUBLISHED.items()]
    cases.append(("resnext29", (JETSON_BATCH, *zoo.input_shape("resnext29")[1:]), JETSON))
    for name, shape, figures in cases:
        found = plan(build(name).eval(), shape, train=lambda name, parameter: False)
        for method in STATIC:
            if method in figures:
                ours = paper_bytes(method, found) / MIB
                worst = max(worst, abs(ours - figures[method]))
                title = {"source": "Source, BN-stat", "tent": "TENT", "full": "full tuning, CoTTA"}.get(method, method)
                cells = [name, "x".join(map(str, shape)), title, f"{figures[method]:g}", f"{ours:.1f}"]
                rows.append([*cells, f"{ours - figures[method]:+.2f}"])
    print(tabulate(rows, ["model", "input", "method", "paper", "ours", "difference"], disable_numparse=True))
    print(f"MiB; {len(rows)} figures, the largest difference is {worst:.2f} MiB:", end=" ")
    print("all within 1 MiB" if worst <= 1 else "NOT all within 1 MiB")
    return 0 if worst <= 1 else 1


def shape_that_fits(shape: Sequence[int], saved_bytes: int) -> tuple[int, ...]:
    """A smaller input of about VERIFY_BYTES: fewer images, two at the least, then smaller ones."""
    batch, *rest = shape
    each = saved_bytes / max(batch, 1)
    batch = min(batch, max(2, int(VERIFY_BYTES / max(each, 1))))
    while each * batch > VERIFY_BYTES and min(rest[-2:]) >= 128:
        rest[-2:] = [size // 2 // 32 * 32 for size in rest[-2:]]
        each /= 4
    return (batch, *rest)


def verify(name: str, shape: Sequence[int], dtype: torch.dtype, saved_bytes: int, static: Sequence[float]) -> int:
    """Runs the real thing against the plan: 0 where saved bytes are the same integers and peaks lie within 3 %.

    The measured peak is of torch's CPU allocator, between operations: without the scratch of libraries.
    """
    from tabulate import tabulate

    small = shape_that_fits(shape, saved_bytes)
    model = build(name, dtype, real=True)
    x = torch.randn(small).to(dtype)
    study = Study(model, x)
    cases: list[tuple[str, nn.Module, str, Any]] = [
        ("TENT, norm layers", model, "norm", None),
        ("full tuning", model, "all", None),
        *((f"static {100 * ratio:g} %", study.rewritten, "all", ratio) for ratio in static),
        ("SURGEON, by memory term", study.rewritten, "all", study.memory_ratios()),
    ]
    rows, agrees = [], True
    for title, which, train, used in cases:
        predicted = plan(which, x, ratios=used, train=train)
        saved, peak = _measured(which, x, train, used)
        equal = "equal" if predicted.saved_bytes == saved else "NOT EQUAL"
        off = f"{100 * (predicted.peak_bytes / peak - 1):+.2f} %"
        rows.append(
            [title, f"{predicted.saved_bytes:,}", f"{saved:,}", equal, f"{predicted.peak_bytes:,}", f"{peak:,}", off]
        )
        agrees &= predicted.saved_bytes == saved and abs(predicted.peak_bytes / peak - 1) <= 0.03
    reduced = "" if tuple(shape) == small else f", reduced from {'x'.join(map(str, shape))}"
    print(f"\nthe real thing at {'x'.join(map(str, small))}{reduced}: bytes that backward holds, and peak of the step")
    headers = ["method", "saved, planned", "measured", "", "peak, planned", "measured", ""]
    align = ("left", "right", "right", "left", "right", "right", "right")
    print(tabulate(rows, headers, disable_numparse=True, colalign=align))
    return 0 if agrees else 1


def _measured(model: nn.Module, x: Tensor, train: str, ratios: Any) -> tuple[int, int]:
    """Saved bytes and peak of a real step."""
    from surgeon_fx.planner.facts import set_ratios, trains
    from surgeon_fx.planner.measure import measured_peak

    chosen, before = trains(model, train), {p: p.requires_grad for p in model.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name, parameter))
    if ratios is not None:
        set_ratios(model, ratios)
    try:
        return retained_bytes(model(x), model), measured_peak(model, x)[0]
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="segformer_b5", help="a name of surgeon_fx.zoo: its own, timm's, tv:..., hf:..."
    )
    parser.add_argument("--batch", type=int, help="default: the model's")
    parser.add_argument("--size", type=parse_size, help="224 or 540x960; default: the model's")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--ratio", type=_ratios, default=[0.5, 0.9], help="of static pruning; several as 0.5,0.9")
    parser.add_argument("--ratios", type=Path, metavar="FILE", help="ratios by layer, as RatioTable.save writes them")
    parser.add_argument("--budget", help="find ratios that keep what is saved within this, as 512MiB")
    parser.add_argument("--method", type=_methods, default=list(METHODS), help=f"some of {','.join(METHODS)}")
    parser.add_argument("--train", choices=("all", "norm"), default="all", help="what static and surgeon train")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page on the last method's plan")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number")
    parser.add_argument("--verify", action="store_true", help="run the real thing, at a size that fits, and compare")
    parser.add_argument("--all-paper", action="store_true", help="every static figure of the paper against ours")


def parse_size(text: str) -> list[int]:
    found = [int(part) for part in text.split("x")]
    if len(found) not in (1, 2) or min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be like 224 or 540x960, got {text!r}")
    return found


def _ratios(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _methods(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [one for one in found if one not in METHODS]:
        raise argparse.ArgumentTypeError(f"no method is called {unknown[0]!r}; there are {', '.join(METHODS)}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """The command. 2 where the arguments make no sense, 1 where a check fails."""
    return answer(lambda _: all_paper() if arguments.all_paper else _run(arguments), arguments)


def _run(arguments: argparse.Namespace) -> int:
    dtype = DTYPES[arguments.dtype]
    shape = input_shape(arguments.model, arguments.batch, arguments.size)
    usual = shape == tuple(zoo.input_shape(arguments.model)) and dtype == torch.float32
    x = torch.empty(shape, dtype=dtype, device="meta")
    study = Study(build(arguments.model, dtype), x, PUBLISHED.get(arguments.model) if usual else None)
    chosen, title, fitted = None, "by memory term", None
    if arguments.ratios:
        chosen, title = read_ratios(arguments.ratios), f"ratios of {arguments.ratios.name}"
    if arguments.budget:
        fitted = fit(study.rewritten, x, budget=arguments.budget, train=arguments.train)
        chosen, title = fitted.ratios, f"within {arguments.budget}"
    outcomes = study.outcomes(arguments.method, arguments.ratio, chosen, title, arguments.train)
    last = outcomes[-1]
    print(f"{arguments.model} at {'x'.join(map(str, shape))}, {arguments.dtype}\n{methods_table(outcomes)}")
    if last.plan.rows:
        print(f"\n{largest_table(last)}")
    if fitted is not None:
        print(f"\n{fitted}\n{ratios_table(fitted.ratios)}")
    if arguments.html:
        last.plan.to_html(arguments.html)
        print(f"\n{arguments.html}: {last.title}")
    if arguments.json:
        arguments.json.write_text(json.dumps(_everything(arguments.model, shape, outcomes, fitted)) + "\n")
    if not arguments.verify:
        return 0
    saved = next((one.plan for one in outcomes if one.method == "full"), None) or plan(study.model, x, train="all")
    return verify(arguments.model, shape, dtype, saved.saved_bytes, arguments.ratio)


def _everything(name: str, shape: Sequence[int], outcomes: Sequence[Outcome], fitted: Fit | None) -> dict[str, Any]:
    return {
        "model": name,
        "input": list(shape),
        "methods": [
            {
                "method": one.method,
                "title": one.title,
                "paper_bytes": one.paper_bytes,
                "published_mib": one.published_mib,
                "plan": report.to_dict(one.plan),
            }
            for one in outcomes
        ],
        "fit": None if fitted is None else {"ratios": fitted.ratios, "saved_bytes": fitted.saved_bytes},
    }
