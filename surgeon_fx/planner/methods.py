"""The memory of every way to adapt one model, side by side: what `surgeon-fx plan` prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surgeon_fx import commands, zoo
from surgeon_fx.api import ratios as ratio_table
from surgeon_fx.api import transform
from surgeon_fx.config import Config
from surgeon_fx.planner import report
from surgeon_fx.planner.arithmetic import LayerInput
from surgeon_fx.planner.facts import no_collection
from surgeon_fx.planner.fit import Fit, fit, memory_term
from surgeon_fx.planner.plan import Plan, plan
from surgeon_fx.planner.report import mib
from surgeon_fx.tables import table

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


class WithoutNumbers(TorchFunctionMode):
    """Leaves out what fills tensors of the meta device, which takes torch longer than to make them."""

    FILLS = frozenset({"normal_", "uniform_", "fill_", "zero_", "erfinv_", "mul_", "add_", "clamp_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.FILLS:
            filled = args[0] if args else kwargs.get("tensor")  # functions of `nn.init` come with names alone
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


def build(name: str, dtype: torch.dtype = torch.float32, real: bool = False) -> nn.Module:
    """A model by name, on the meta device where its constructor can do without numbers."""
    if not real:
        try:
            with torch.device("meta"), WithoutNumbers():
                return zoo.create(name).to(dtype)
        except (RuntimeError, NotImplementedError):  # it reads a tensor while it is built
            pass
    return zoo.create(name).to(dtype)


def input_shape(name: str, batch: int | None, size: Sequence[int] | None) -> tuple[int, ...]:
    """The input of a model by name, at another batch or another height and width than its own."""
    usual, *rest = zoo.input_shape(name)
    if size:
        rest[-2:] = size if len(size) == 2 else [*size, *size]
    return (batch or usual, *rest)


def empty_input(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An input without memory: numbers of tokens for Hugging Face's models of text, else of a dtype."""
    text = getattr(model, "main_input_name", None) == "input_ids"
    return torch.empty(tuple(shape), dtype=torch.int64 if text else dtype, device="meta")


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
        tell: Callable[[str], None] = lambda method: None,
    ) -> list[Outcome]:
        """A row per method; `chosen` ratios, with their title, take the place of SURGEON's memory term.

        `tell` is called with each method before it is planned.
        """
        found = []
        for method in methods:
            tell(method)
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
    rows = []
    for one in outcomes:
        row = {"method": one.title, "paper's count": mib(one.paper_bytes)}
        if any(other.published_mib is not None for other in outcomes):
            star = " *" if one.method == "surgeon" else ""
            row["published"] = "" if one.published_mib is None else f"{one.published_mib:g}{star}"
        rows.append(row | {"saved": mib(one.plan.saved_bytes), "peak": mib(one.plan.peak_bytes)})
        rows[-1]["peak in"] = report.peak_at(one.plan)
    lines = [table(rows, headers="keys"), "all in MiB"]
    if any(one.published_mib is not None and one.method == "surgeon" for one in outcomes):
        lines.append("* the paper's ratios depend on gradients, so on data; every other figure follows from shapes")
    return "\n".join(lines)


def largest_table(one: Outcome, most: int = 10) -> str:
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
    return f"{title}\n{table(rows, headers='keys')}"


def ratios_table(ratios: Mapping[str, float]) -> str:
    """Ratios by layer, or by group where layers are many."""
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
    return table(rows, headers="keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="segformer_b5", help="a name of surgeon_fx.zoo: its own, timm's, tv:..., hf:..."
    )
    parser.add_argument("--batch", type=commands.count, help="default: the model's")
    parser.add_argument("--size", type=commands.size, help="224 or 540x960; default: the model's")
    parser.add_argument("--shape", type=commands.shape, help="of the whole input, as 8x128 tokens for hf:bert")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    what = "of static pruning; several as 0.5,0.9"
    parser.add_argument("--ratio", type=commands.ratios, default=[0.5, 0.9], help=what)
    parser.add_argument("--ratios", type=Path, metavar="FILE", help="ratios by layer, as RatioTable.save writes them")
    parser.add_argument("--budget", help="find ratios that keep what is saved within this, as 512MiB")
    parser.add_argument("--method", type=_methods, default=list(METHODS), help=f"some of {','.join(METHODS)}")
    parser.add_argument("--train", choices=("all", "norm"), default="all", help="what static and surgeon train")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page on the last method's plan")
    what = "write every number to a file, or print nothing but them"
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help=what)
    commands.add_quiet(parser)


def _methods(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [one for one in found if one not in METHODS]:
        raise argparse.ArgumentTypeError(f"no method is called {unknown[0]!r}; there are {', '.join(METHODS)}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """The command. 2 where the arguments make no sense."""
    return commands.answer(_run, arguments)


def _run(arguments: argparse.Namespace) -> int:
    compare(arguments)
    return 0


@no_collection()
def compare(arguments: argparse.Namespace, published: Mapping[str, float] | None = None) -> tuple[Study, list[Outcome]]:
    """Prints and writes what is asked for. `published` are figures by method, in MiB, of the model at its own input."""
    name, dtype = arguments.model, DTYPES[arguments.dtype]
    steps = 1 + bool(arguments.budget) + len(arguments.method)
    progress = commands.Progress(steps, arguments.quiet or arguments.json == "-")
    progress.step(f"building {name}")
    shape = _shape(arguments)
    model = build(name, dtype)
    usual = not arguments.shape and shape == tuple(zoo.input_shape(name)) and dtype == torch.float32
    study = Study(model, empty_input(model, shape, dtype), published if usual else None)
    try:
        outcomes, fitted = _plans(study, arguments, lambda what: progress.step(f"{name}: {what}"))
    except Exception as error:
        raise refusal(study, name, error) from None
    finally:
        progress.close()
    last = outcomes[-1]
    written = json.dumps(_everything(name, shape, outcomes, fitted)) + "\n" if arguments.json else ""
    if arguments.html:
        last.plan.to_html(arguments.html)
    if arguments.json == "-":
        print(written, end="")
        return study, outcomes
    print(f"{name} at {'x'.join(map(str, shape))}, {arguments.dtype}\n{methods_table(outcomes)}")
    if last.plan.rows:
        print(f"\n{largest_table(last)}")
    if fitted is not None:
        print(f"\n{fitted}\n{ratios_table(fitted.ratios)}")
    if arguments.html:
        print(f"\n{arguments.html}: {last.title}")
    if arguments.json:
        Path(arguments.json).write_text(written)
    return study, outcomes


def _shape(arguments: argparse.Namespace) -> tuple[int, ...]:
    if not arguments.shape:
        return input_shape(arguments.model, arguments.batch, arguments.size)
    if arguments.batch or arguments.size:
        raise ValueError("--shape is the whole input: leave out --batch and --size")
    return tuple(arguments.shape)


def _plans(
    study: Study, arguments: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[list[Outcome], Fit | None]:
    chosen, title, fitted = None, "by memory term", None
    if arguments.ratios:
        chosen, title = read_ratios(arguments.ratios), f"ratios of {arguments.ratios.name}"
    if arguments.budget:
        tell("ratios for the budget")
        fitted = fit(study.rewritten, study.x, budget=arguments.budget, train=arguments.train)
        chosen, title = fitted.ratios, f"within {arguments.budget}"
    outcomes = study.outcomes(arguments.method, arguments.ratio, chosen, title, arguments.train, tell)
    return outcomes, fitted


def refusal(study: Study, name: str, error: Exception) -> Exception:
    """The error of a plan, as one about the input if the plain model does not take it either."""
    try:
        _ = study.source
    except Exception as cause:
        shape = "x".join(map(str, study.x.shape))
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        return ValueError(f"{name} does not take an input of {shape}: {reason[0]}{_usual(name)}")
    return error


def _usual(name: str) -> str:
    try:
        return f" (its usual input is {'x'.join(map(str, zoo.input_shape(name)))})"
    except ValueError:  # it has none
        return ""


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
