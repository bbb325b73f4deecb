"""One model of `bench/coverage.py`: runs its steps and compares them. As a script, it is asked for models on stdin.

A step is forward, a fixed random projection of every output (or the sum of the losses a detector returns), backward.
The steps of a model, each from the same seed and buffers: eager twice, transformed at ratio 0, transformed at 0.9, and
the forward of `explain`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from common import MIB
from coverage_models import Built, Case, find_case, quiet
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

import surgeon_fx
from surgeon_fx.api import rewrite_of
from surgeon_fx.explain import Explanation
from surgeon_fx.ops.registry import LAYERS, RULES
from surgeon_fx.ops.slots import MARK
from surgeon_fx.passes.tag_saves import saving_of
from surgeon_fx.retained import nodes, retained_bytes

RATIO = 0.9
NATIVE_LAYERS = ("Convolution", "Addmm", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm")
LAYER_FUNCTIONS = {getattr(function, "__name__", "") for function, rule in RULES.items() if rule.family in LAYERS}


@dataclass
class Findings:
    """A number for each metric that was reached, and what there is to say about it."""

    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def put(self, metric: str, value: float, note: str = "") -> None:
        self.values[metric], self.notes[metric] = float(value), note


class Step(NamedTuple):
    outputs: list[Tensor]
    loss: Tensor
    retained: int
    forward_seconds: float
    native: list[str]  # layers' calls on a trained weight that no operation of ours answers for


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
    start = time.perf_counter()
    out = model(*inputs, **built.options)
    seconds = time.perf_counter() - start
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    retained, native = retained_bytes(outputs, model), native_calls(outputs)
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
    return Step([x.detach() for x in outputs], loss.detach(), retained, seconds, native)


def native_calls(outputs: list[Tensor]) -> list[str]:
    """Native convolutions, linears and norms of a trained parameter, in autograd's graph, that bear no mark of ours."""

    def is_parameter(node: Node | None) -> bool:
        while node is not None and len(node.next_functions) == 1 and not hasattr(node, "variable"):  # views, casts
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)

    found = list(nodes(outputs))
    # A linear layer over batches of rows is a view of a product, and the view bears the mark.
    marked = {
        following
        for node in found
        if MARK in node.metadata and "View" in node.name()
        for following, _ in node.next_functions
    }
    return [
        node.name()
        for node in found
        if node.name().removesuffix("Backward0") in NATIVE_LAYERS
        and MARK not in node.metadata
        and node not in marked
        and any(is_parameter(following) for following, _ in node.next_functions)
    ]


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


def tally(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).most_common(6))


def layer_nodes(graph: fx.GraphModule) -> int:
    """Nodes rewritten into a convolution, linear or norm of ours, in a graph and in the regions inside it."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    savings = [saving_of(node) for part in parts for node in part.graph.nodes]
    return sum(saving is not None and saving.rule in LAYERS for saving in savings)


def unhandled(explanation: Explanation) -> str:
    """The operations that keep most of what is not handled: their bytes, and the line of the largest tensor."""
    total: Counter[str] = Counter()
    where: dict[str, tuple[int, str]] = {}
    for row in explanation.rows:
        if not row.handled:
            who = row.reason.partition(" needs")[0]
            total[who] += row.dense_bytes
            place = f"{row.layer or 'no layer'} {row.source}".strip()
            where[who] = max(where.get(who, (0, "")), (row.dense_bytes, place))
    share = max(explanation.dense_bytes, 1)
    return "; ".join(
        f"{who} {size / MIB:.2f} MiB = {100 * size / share:.1f} % ({where[who][1]})"
        for who, size in total.most_common(4)
        if size > 0.001 * share
    )


def check(case: Case) -> Findings:
    """Everything about one model. What fails is in the notes, and what comes after it has no number."""
    found, start = Findings(), time.perf_counter()
    stage = "eager"
    try:
        with quiet():
            for stage in _stages(case, found):  # noqa: B007
                pass
    except Exception as error:  # whatever a model does, the others are looked at too
        line = (str(error).splitlines() or [""])[0][:200]
        found.put("transforms", 0, f"{stage}: {type(error).__name__}: {line}")
    torch._dynamo.reset()
    gc.collect()
    found.put("seconds", time.perf_counter() - start)
    return found


def _stages(case: Case, found: Findings) -> Iterator[str]:
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
    found.put("deterministic", steady, "" if steady else "eager itself differs from run to run")
    found.put("eager", first.retained)
    restore(model)

    yield "transform"
    transformed = surgeon_fx.transform(model)
    built = built._replace(model=transformed)

    yield "ratio 0"
    gradients = Gradients(expected)
    exact = step(built, gradients)
    found.put("first_call", exact.forward_seconds - again.forward_seconds)
    found.put("forward_equal", same(exact.outputs, first.outputs))
    wrong = [*gradients.unequal, *gradients.missing()]
    equal = not wrong and torch.equal(exact.loss, first.loss)
    found.put("gradients_equal", equal, f"unequal: {some(wrong)}" if wrong else "")
    found.put("exact", exact.retained)
    restore(transformed)

    yield f"ratio {RATIO}"
    surgeon_fx.ratios(transformed).fill(RATIO)
    gradients, rewrite = Gradients(expected), rewrite_of(transformed)
    rewrite.ran, rewrite.outside = [], []
    pruned = step(built, gradients)
    in_graphs = sum(layer_nodes(capture.graph) for capture in rewrite.ran)
    outside = [taken.where for taken in rewrite.outside if taken.where in LAYER_FUNCTIONS]
    rewrite.ran = rewrite.outside = None
    found.put("pruned_forward_equal", same(pruned.outputs, first.outputs))
    lost = [*gradients.infinite, *gradients.missing()]
    found.put("pruned_finite", not lost, f"not finite at {RATIO}: {some(lost)}" if lost else "")
    found.put("pruned", pruned.retained)
    notes = [f"outside graphs: {tally(outside)}" if outside else "", f"native: {tally(pruned.native)}"]
    calls = in_graphs + len(outside) + len(pruned.native)
    found.put("layer_calls", calls)
    found.put("share", in_graphs / max(calls, 1), "; ".join(notes[: 1 + bool(pruned.native)]))
    restore(transformed)
    expected.clear()
    gc.collect()

    yield "explain"
    seed()
    explanation = surgeon_fx.explain(transformed, *fresh_inputs(built), **built.options)
    found.put("handled", explanation.handled_share, unhandled(explanation))
    found.put("graphs", len(explanation.graphs))
    found.put(
        "breaks", len(explanation.breaks), some(dict.fromkeys(f"{b.where}: {b.reason}" for b in explanation.breaks))
    )
    found.put("transforms", 1)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # models may print
    for line in sys.stdin:
        found = check(find_case(*line.split()))
        print(json.dumps({"values": found.values, "notes": found.notes}), file=answers, flush=True)


if __name__ == "__main__":
    main()
