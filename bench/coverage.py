"""Transforms many models and says what came of it: exact at ratio 0? layers rewritten? share of retained bytes handled?

    python bench/coverage.py --suite timm --quick
    python bench/coverage.py --suite all --json bench/results/coverage.jsonl --resume

One smallest model of each timm family; torchvision's models for classification, segmentation, detection, video and
optical flow; small Hugging Face models with random weights. Inputs are small, models in training mode. A step is
forward, a fixed random projection of every output (or the sum of the losses a detector returns), backward. The steps
of a model, each from the same seed and buffers: eager twice, transformed at ratio 0, transformed at 0.9, and `explain`.

- eager, exact, pruned: bytes the autograd graph keeps alive after forward, parameters and buffers apart
- handled: of those, the share that operations rewritten at 0.9 answer for, by `explain`
- layers: convolutions, linears and normalisations, torch's or by the name of their class; in the ratio table, and of
  those that ran, how many let no operation save outside a policy
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common import MIB, RESULTS, Environment, Row, environment
from coverage_models import SUITES, Built, Case, quick_models, quiet
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

import surgeon_fx
from surgeon_fx.explain import Explanation
from surgeon_fx.ops.policies import SMALL_BYTES, storage_of
from surgeon_fx.ops.runtime import state
from surgeon_fx.retained import retained_bytes

RATIO = 0.9
EXACT_LIMIT = 1.03  # of the exact tier's bytes over eager's
HANDLED_GOAL = 0.95
TORCH_LAYERS = (_ConvNd, nn.Linear, _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
UNITS = {
    **dict.fromkeys(("transforms", "deterministic", "forward_equal", "gradients_equal"), "bool"),
    **dict.fromkeys(("pruned_forward_equal", "pruned_finite"), "bool"),
    **dict.fromkeys(("layers", "layers_in_table", "layers_run", "layers_under_policy"), "count"),
    **dict.fromkeys(("eager", "exact", "pruned"), "bytes"),
    "handled": "share",
    "seconds": "s",
}
LAST = "seconds"  # with it, a model is done


@dataclass
class Result:
    """What came of one model: a number for each metric that was reached, and what there is to say about it."""

    suite: str
    model: str
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def put(self, metric: str, value: float, note: str = "") -> None:
        self.values[metric], self.notes[metric] = float(value), note

    def is_true(self, metric: str) -> bool:
        return self.values.get(metric) == 1

    def over_eager(self, metric: str) -> float:
        return self.values.get(metric, 0) / max(self.values.get("eager", 0), 1)

    def all_layers(self) -> bool:
        v = self.values
        return "layers" in v and v["layers"] == v["layers_in_table"] and v["layers_run"] == v["layers_under_policy"]

    def note(self) -> str:
        return "; ".join(note for metric, note in self.notes.items() if note and metric != "handled")

    def rows(self, where: Environment) -> list[Row]:
        """One row of bench/common.py's schema for each metric."""
        case = {"suite": self.suite, "model": self.model, "ratio": RATIO}
        rows = []
        for metric, x in self.values.items():
            tier = "eager" if metric in ("eager", "deterministic") else "surgeon_fx"
            rows.append(Row("coverage", case, tier, metric, UNITS[metric], x, x, x, 1, "", self.notes[metric], where))
        return rows


def results_of(rows: Iterable[Row]) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}
    for row in rows:
        key = row.case["suite"], row.case["model"]
        results.setdefault(key, Result(*key)).put(row.metric, row.p50 or 0.0, row.note)
    return list(results.values())


def finished_rows(path: Path) -> list[Row]:
    """The rows of the models that a file holds completely; a line cut off by a crash ends it."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(Row.from_json(line))
        except (KeyError, TypeError, json.JSONDecodeError):
            break
    done = {(r.suite, r.model) for r in results_of(rows) if LAST in r.values}
    return [row for row in rows if (row.case["suite"], row.case["model"]) in done]


class Step(NamedTuple):
    outputs: list[Tensor]
    loss: Tensor
    retained: int


def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:  # not ours, but some models draw from it
        sys.modules["numpy"].random.seed(0)


def fresh_inputs(built: Built) -> tuple[Any, ...]:
    """The inputs as new leaves, floats among them with a gradient to come."""
    return tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), built.inputs)


def step(built: Built, visit: Callable[[str, Tensor], None]) -> Step:
    """Forward and backward. Each gradient is shown to `visit` and dropped: large models hold one set, not three."""
    model = built.model
    seed()
    inputs = fresh_inputs(built)
    out = model(*inputs, **built.options)
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    retained = retained_bytes(outputs, model)
    generator = torch.Generator().manual_seed(1)
    losses = [
        x.float() if x.dim() == 0 else (x.float() * torch.randn(x.shape, generator=generator)).mean()
        for x in outputs
        if x.requires_grad
    ]
    loss = torch.stack(losses).sum()

    def take(name: str, x: Tensor) -> None:
        assert x.grad is not None
        visit(name, x.grad)
        x.grad = None

    leaves = {f"input {i}": x for i, x in enumerate(tree_leaves(inputs)) if isinstance(x, Tensor)}
    hooks = [
        x.register_post_accumulate_grad_hook(partial(take, name))
        for name, x in (leaves | dict(model.named_parameters())).items()
        if x.requires_grad
    ]
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return Step([x.detach() for x in outputs], loss.detach(), retained)


@dataclass
class Gradients:
    """Compares the gradients of a step with those of another."""

    expected: dict[str, Tensor]
    seen: set[str] = field(default_factory=set)
    unequal: list[str] = field(default_factory=list)
    infinite: list[str] = field(default_factory=list)

    def __call__(self, name: str, gradient: Tensor) -> None:
        self.seen.add(name)
        if name not in self.expected or not torch.equal(self.expected[name], gradient):
            self.unequal.append(name)
        if not gradient.isfinite().all():
            self.infinite.append(name)

    def missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.seen]


def same(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    return len(outputs) == len(expected) and all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def some(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def layers_of(model: nn.Module) -> list[str]:
    """Convolutions, linears and normalisations: torch's, and what is called so and has a weight."""

    def is_layer(module: nn.Module) -> bool:
        named = re.search("Conv|Linear|Norm", type(module).__name__) and module._parameters.get("weight") is not None
        return isinstance(module, TORCH_LAYERS) or bool(named)

    return [name for name, module in model.named_modules() if is_layer(module)]


class Watch:
    """Looks on at a forward: which layers ran, and which of those let something large be saved outside a policy.

    A layer of the original that runs in place of its copy is outside of all of them.
    """

    def __init__(self, model: nn.Module, original: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.originals = {id(module): name for name, module in original.named_modules() if id(module) not in self.names}
        self.own = {storage_of(x) for x in (*model.parameters(), *model.buffers())}
        self.layers = set(layers_of(model))
        self.path: list[str] = []
        self.ran: set[str] = set()
        self.outside: Counter[str] = Counter()

    def __enter__(self) -> Watch:
        self.hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self.before, state.observer = state.observer, self._saved
        return self

    def __exit__(self, *_: Any) -> None:
        state.observer = self.before
        for hook in self.hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        original = self.originals.get(id(module))
        self.path.append(self.names.get(id(module), original or ""))
        self.ran |= {self.path[-1]} & self.layers
        if original is not None:
            self.outside.update({original} & self.layers)

    def _leave(self, *_: Any) -> None:
        self.path.pop()

    def _saved(self, policy: Any, x: Tensor, _: Any) -> None:
        if not policy.handles and x.nbytes > SMALL_BYTES and storage_of(x) not in self.own:
            self.outside.update(self.layers.intersection(self.path))


def unhandled(explanation: Explanation) -> str:
    """The operations that keep most of what is not handled: their bytes, and the line of the largest tensor."""
    total: Counter[str] = Counter()
    where: dict[str, tuple[int, str]] = {}
    for row in explanation.rows:
        if not row.handled:
            who = row.reason.partition(" needs it")[0] if " needs it" in row.reason else row.operation
            total[who] += row.dense_bytes
            place = f"{row.layer or 'no layer'} {row.source}".strip()
            where[who] = max(where.get(who, (0, "")), (row.dense_bytes, place))
    share = max(explanation.dense_bytes, 1)
    return "; ".join(
        f"{who} {size / MIB:.2f} MiB = {100 * size / share:.1f} % ({where[who][1]})"
        for who, size in total.most_common(4)
        if size > 0.001 * share
    )


def check(case: Case) -> Result:
    """Everything about one model. What fails is in the notes, and what comes after it has no number."""
    result, start = Result(case.suite, case.name), time.perf_counter()
    stage = "eager"
    try:
        with quiet():
            for stage in _stages(case, result):  # noqa: B007
                pass
    except Exception as error:  # whatever a model does, the others are looked at too
        line = (str(error).splitlines() or [""])[0][:200]
        result.put("transforms", 0, f"{stage}: {type(error).__name__}: {line}")
    gc.collect()
    result.put(LAST, time.perf_counter() - start)
    return result


def _stages(case: Case, result: Result) -> Iterator[str]:
    """Runs the steps one by one; yields what comes next."""
    seed()
    built = case.build()
    model = built.model.train()
    buffers = {name: x.detach().clone() for name, x in model.named_buffers()}

    def restore(model: nn.Module) -> None:
        for name, x in model.named_buffers():
            x.data.copy_(buffers[name])

    expected: dict[str, Tensor] = {}
    first = step(built, expected.__setitem__)
    restore(model)
    gradients = Gradients(expected)
    again = step(built, gradients)
    steady = same([*again.outputs, again.loss], [*first.outputs, first.loss]) and not gradients.unequal
    result.put("deterministic", steady, "" if steady else "eager itself differs from run to run")
    result.put("eager", first.retained)
    restore(model)

    yield "transform"
    transformed = surgeon_fx.transform(model)
    built = built._replace(model=transformed)
    layers, table = layers_of(model), surgeon_fx.ratios(transformed)

    yield "ratio 0"
    gradients = Gradients(expected)
    exact = step(built, gradients)
    result.put("transforms", 1)
    result.put("forward_equal", same(exact.outputs, first.outputs))
    wrong = [*gradients.unequal, *gradients.missing()]
    equal = not wrong and torch.equal(exact.loss, first.loss)
    result.put("gradients_equal", equal, f"unequal: {some(wrong)}" if wrong else "")
    result.put("exact", exact.retained)
    restore(transformed)

    yield f"ratio {RATIO}"
    table.fill(RATIO)
    gradients = Gradients(expected)
    with Watch(transformed, model) as watch:
        pruned = step(built, gradients)
    result.put("pruned_forward_equal", same(pruned.outputs, first.outputs))
    lost = [*gradients.infinite, *gradients.missing()]
    result.put("pruned_finite", not lost, f"not finite at {RATIO}: {some(lost)}" if lost else "")
    result.put("pruned", pruned.retained)
    result.put("layers", len(layers))
    missing = [name for name in layers if name not in table]
    kinds = sorted({type(model.get_submodule(name)).__name__ for name in missing})
    result.put("layers_in_table", len(layers) - len(missing), f"no ratio: {some(kinds)}" if missing else "")
    bare = [f"{name} ({type(model.get_submodule(name)).__name__})" for name in layers if name in watch.outside]
    result.put("layers_run", len(watch.ran))
    result.put("layers_under_policy", len(watch.ran) - len(bare), f"outside a policy: {some(bare)}" if bare else "")
    restore(transformed)
    expected.clear()
    gc.collect()

    yield "explain"
    seed()
    explanation = surgeon_fx.explain(transformed, *fresh_inputs(built), **built.options)
    result.put("handled", explanation.handled_share, unhandled(explanation))


# All models


def report(results: list[Result]) -> str:
    def line(r: Result) -> dict[str, str]:
        def shown(text: str, *metrics: str, by: float = 1) -> str:
            there = all(metric in r.values for metric in metrics)
            return text.format(*(r.values[metric] / by for metric in metrics)) if there else "-"

        def word(metric: str) -> str:
            return "-" if metric not in r.values else "yes" if r.is_true(metric) else "NO"

        eager = max(r.values.get("eager", 0), 1)
        return {
            "model": f"{r.suite}:{r.model}",
            "forward": word("forward_equal"),
            "gradients": word("gradients_equal"),
            f"forward {RATIO}": word("pruned_forward_equal"),
            "finite": word("pruned_finite"),
            "in table": shown("{:.0f}/{:.0f}", "layers_in_table", "layers"),
            "by policy": shown("{:.0f}/{:.0f}", "layers_under_policy", "layers_run"),
            "eager MiB": shown("{:.1f}", "eager", by=MIB),
            "exact/eager": shown("{:.3f}", "exact", by=eager),
            f"{RATIO}/eager": shown("{:.3f}", "pruned", by=eager),
            "handled": shown("{:.3f}", "handled"),
            "note": r.note()[:100],
        }

    table = tabulate([line(r) for r in results], headers="keys", disable_numparse=True)
    return "\n".join([table, "", *summary(results)])


def summary(results: list[Result]) -> list[str]:
    """How many of how many, and every exception by name."""
    done = [r for r in results if r.is_true("transforms")]
    lines = [f"{len(done)} of {len(results)} models transform and run"]
    lines += [f"  {r.suite}:{r.model}: {r.notes['transforms']}" for r in results if r not in done]

    def count(what: str, held: Callable[[Result], bool], why: Callable[[Result], str]) -> None:
        failed = [r for r in done if not held(r)]
        lines.append(f"{len(done) - len(failed)} of {len(done)}: {what}")
        lines.extend(f"  {r.suite}:{r.model}: {why(r)}".rstrip(": ") for r in failed)

    count("forward equal to the bit at ratio 0", lambda r: r.is_true("forward_equal"), Result.note)
    count("loss and every gradient equal to the bit at ratio 0", lambda r: r.is_true("gradients_equal"), Result.note)
    count(f"forward equal at {RATIO}", lambda r: r.is_true("pruned_forward_equal"), Result.note)
    count(f"backward finite at {RATIO}", lambda r: r.is_true("pruned_finite"), Result.note)
    count("all layers in the ratio table and under a policy", Result.all_layers, Result.note)
    count(
        f"exact tier within {EXACT_LIMIT} of eager's bytes",
        lambda r: r.over_eager("exact") <= EXACT_LIMIT,
        lambda r: f"{r.over_eager('exact'):.3f}",
    )
    count(
        f"at least {HANDLED_GOAL:.0%} of the bytes handled",
        lambda r: r.values.get("handled", 0) >= HANDLED_GOAL,
        lambda r: f"{r.values.get('handled', 0):.3f}: {r.notes.get('handled', '')}",
    )
    if done:
        worst = max(done, key=lambda r: r.over_eager("exact"))
        handled, held = ([r.values.get("handled", 0) for r in done], [r.over_eager("pruned") for r in done])
        lines.append(f"median share of retained bytes handled: {median(handled):.3f}, smallest {min(handled):.3f}")
        lines.append(f"bytes at {RATIO} over eager's: median {median(held):.3f}, largest {max(held):.3f}")
        lines.append(f"exact tier over eager's: largest {worst.over_eager('exact'):.3f} ({worst.suite}:{worst.model})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a fast subset of each suite")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS / "coverage.jsonl")
    parser.add_argument("--resume", action="store_true", help="go on with the models that --json does not hold yet")
    arguments = parser.parse_args()
    suites = list(SUITES) if arguments.suite == "all" else [arguments.suite]
    cases = quick_models(*suites) if arguments.quick else [case for suite in suites for case in SUITES[suite]()]
    cases = [case for case in cases if not arguments.only or arguments.only in case.name]
    rows = finished_rows(arguments.json) if arguments.resume else []
    done = {(row.case["suite"], row.case["model"]) for row in rows}
    left = [case for case in cases if (case.suite, case.name) not in done]
    where = environment(torch.device("cpu"))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with arguments.json.open("w") as file, contextlib.suppress(KeyboardInterrupt):  # what is done is reported
        file.writelines(row.to_json() + "\n" for row in rows)
        for case in (bar := tqdm(left, unit="model", file=sys.stderr)):
            bar.set_description(f"{case.suite}:{case.name}")
            found = check(case).rows(where)
            file.writelines(row.to_json() + "\n" for row in found)
            file.flush()
            rows += found
    print(report(results_of(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
