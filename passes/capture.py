"""Capture: what Dynamo hands over, rewritten by the passes, and what runs in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from surgeon_fx.ops import interpreter
from surgeon_fx.ops.interpreter import paused
from surgeon_fx.ops.keep import one_forward
from surgeon_fx.passes.pipeline import run_passes
from surgeon_fx.passes.tag_saves import Layers
from surgeon_fx.passes.watch import WatchedGraph

if TYPE_CHECKING:
    from surgeon_fx.runtime import Rewrite


OUR_FRAMES = (interpreter.__file__, str(Path(interpreter.__file__).parents[1] / "runtime.py"))


@dataclass(frozen=True)
class Break:
    """Where a model leaves its graph, and why."""

    where: str
    reason: str


@dataclass(eq=False)
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
        _forget_our_frames(gm)
        counts = run_passes(gm, layers_of(gm, example_inputs, rewrite), rewrite.config)
        capture = Capture(gm, counts, _break(gm))
        rewrite.captures.append(capture)
        run = gm.forward

        def call(*args: Any) -> Any:
            if rewrite.ran is not None:
                rewrite.ran.append(capture)
            with one_forward(), paused():
                if rewrite.watcher is None:
                    return run(*args)
                names = {str(id(module)): name for name, module in rewrite.module.named_modules()}
                return WatchedGraph(gm, rewrite.watcher, names, rewrite.layers).run(*args)

        return call


def layers_of(gm: fx.GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite) -> Layers:
    """What the passes need to know: which inputs of a graph are parameters, and whose, or buffers."""
    owners, own_buffers = rewrite.owners(), {id(x) for x in rewrite.module.buffers()}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = list(zip(placeholders, example_inputs, strict=False))
    none = rewrite.slots.key("")
    parameters = {node: owners.get(id(x), none) for node, x in given if isinstance(x, torch.nn.Parameter)}
    buffers = frozenset(node for node, x in given if id(x) in own_buffers)
    return Layers(parameters, buffers, rewrite.layer_ids(), none)


def _forget_our_frames(gm: fx.GraphModule) -> None:
    """Dynamo saw calls through the runtime and the interpreter; what a reader wants is the line of the model."""
    for node in gm.graph.nodes:
        if trace := node.meta.get("stack_trace"):
            frames = re.split(r"(?m)^(?=  File )", trace)
            theirs = [one for one in frames if not any(f'"{ours}"' in one for ours in OUR_FRAMES)]
            node.meta["stack_trace"] = "".join(theirs)


def _break(gm: fx.GraphModule) -> Break | None:
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    where = next((one for one in reversed(found.user_stack) if one.filename not in OUR_FRAMES), None)
    place = "" if where is None else f"{where.filename.rpartition('/')[2]}:{where.lineno}"
    return Break(place, str(found.reason).strip().splitlines()[0])
