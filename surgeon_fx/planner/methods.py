"""The memory of every way to adapt one model, side by side: what `surgeon-fx plan` prints."""

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
from surgeon_fx.planner.report import mib

METHODS = ("source", "bn_stat", "tent", "full", "static", "surgeon")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def paper_bytes(method: str, found: Plan) -> int:
    """What the paper's way of counting gives for a method."""
    if method in ("source", "bn_stat"):
        return found.paper_largest_bytes
    return found.paper_norm_bytes if method == "tent" else found.paper_cache_bytes


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
    """Ratios by layer, or by group where layers are many."""
    from tabulate import tabulate

    groups = report.groups_of(ratios) if len(ratios) > 2 * report.MOST_GROUPS else {name: name for name in ratios}
    found: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        found.setdefault(groups[name], []).append(ratio)
    rows = [
        {
            "where": name,
            "layers": len(some),
            "ratio": f"{min(some):.3f}" if min(some) == max(some) else f"{min(some):.3f} to {max(some):.3f}",
        }
        for name, some in found.items()
    ]
    return tabulate(rows, headers="keys", disable_numparse=True)


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
    """The command. 2 where the arguments make no sense."""
    return answer(_run, arguments)


def _run(arguments: argparse.Namespace) -> int:
    compare(arguments)
    return 0


def compare(arguments: argparse.Namespace, published: Mapping[str, float] | None = None) -> tuple[Study, list[Outcome]]:
    """Prints and writes what is asked for. `published` are figures by method, in MiB, of the model at its own input."""
    dtype = DTYPES[arguments.dtype]
    shape = input_shape(arguments.model, arguments.batch, arguments.size)
    usual = shape == tuple(zoo.input_shape(arguments.model)) and dtype == torch.float32
    x = torch.empty(shape, dtype=dtype, device="meta")
    study = Study(build(arguments.model, dtype), x, published if usual else None)
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
    return study, outcomes


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
