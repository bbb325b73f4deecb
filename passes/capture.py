"""Capture: what Dynamo hands over, rewritten by the passes, and what runs in its place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from surgeon_fx import allocator
from surgeon_fx.ops import interpreter
from surgeon_fx.ops.interpreter import paused
from surgeon_fx.passes.pipeline import run_passes
from surgeon_fx.passes.tag_saves import Layers

if TYPE_CHECKING:
    from surgeon_fx.runtime import Rewrite


NOT_USERS = tuple(f"{Path(str(place)).parent}{os.sep}" for place in (torch.__file__, allocator.__file__, __file__))
INTERPRETER = interpreter.__file__
ORIGIN = "surgeon_fx_origin"  # in the metadata of an autograd node: module and line of source it comes from


@dataclass(frozen=True)
class Break:
    """Where a model leaves its graph, and why."""

    where: str
    reason: str


@dataclass
class Capture:
    """One captured graph, rewritten."""

    graph: fx.GraphModule
    counts: dict[str, int]  # nodes each pass changed
    broke: Break | None  # why it ended, if the model goes on after it


class Backend:
    """The compiler that `torch.compile` calls with each graph of one transformed model."""

    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        rewrite = self.rewrite
        owner = rewrite.owners()
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        parameters = {
            node: owner(x)
            for node, x in zip(placeholders, example_inputs, strict=False)
            if isinstance(x, torch.nn.Parameter)
        }
        _forget_our_frames(gm)
        counts = run_passes(gm, Layers(parameters, rewrite.layer_ids(), rewrite.slots.key("")), rewrite.config)
        capture = Capture(gm, counts, _break(gm))
        rewrite.captures.append(capture)
        run = gm.forward

        def call(*args: Any) -> Any:
            if rewrite.ran is not None:
                rewrite.ran.append(capture)
            with paused():
                return run(*args) if rewrite.watcher is None else WatchedGraph(gm).run(*args)

        return call


class WatchedGraph(fx.Interpreter):
    """Runs a graph node by node and leaves on autograd's nodes where they come from."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if torch.is_grad_enabled() and n.op not in ("placeholder", "output"):
            leave_origin(result, layer_path(n), source_line(n))
        return result


def leave_origin(result: Any, layer: str, source: str) -> None:
    """Writes an origin on the autograd nodes behind a result that have none yet."""
    ahead = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor)]
    while ahead:
        node = ahead.pop()
        if node is None or ORIGIN in node.metadata:
            continue
        node.metadata[ORIGIN] = (layer, source)
        ahead.extend(following for following, _ in node.next_functions)


def layer_path(node: fx.Node) -> str:
    """The name of the innermost module that a captured node ran in."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].partition("]")[2].lstrip(".") if stack else ""


def source_line(node: fx.Node) -> str:
    """File and line that a captured node was written in, outside torch and this package."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for file, line in reversed(lines):
        if not file.startswith(NOT_USERS):
            return f"{Path(file).name}:{line}"
    return ""


def _forget_our_frames(gm: fx.GraphModule) -> None:
    """Dynamo saw calls through the interpreter; what a reader wants is the line of the model."""
    for node in gm.graph.nodes:
        if trace := node.meta.get("stack_trace"):
            frames = re.split(r"(?m)^(?=  File )", trace)
            node.meta["stack_trace"] = "".join(one for one in frames if f'"{INTERPRETER}"' not in one)


def _break(gm: fx.GraphModule) -> Break | None:
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    where = found.user_stack[-1] if found.user_stack else None
    place = "" if where is None else f"{where.filename.rpartition('/')[2]}:{where.lineno}"
    return Break(place, str(found.reason).strip().splitlines()[0])


