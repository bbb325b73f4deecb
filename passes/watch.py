"""Watching a forward: autograd's nodes learn the module and the line of source that made them.

`explain` and the planner read them off the graph afterwards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from surgeon_fx import allocator

NOT_USERS = tuple(f"{Path(str(place)).parent}{os.sep}" for place in (torch.__file__, allocator.__file__, __file__))
ORIGIN = "surgeon_fx_origin"  # in the metadata of an autograd node: module and line of source it comes from


class Watcher(TorchFunctionMode):
    """Leaves on every new autograd node the module and the line of source that made it.

    As a mode it watches calls; graphs tell it what they run. `path` ends with the name of the module that runs, and
    `left` is told of every call of a layer: its name, its input, and the bytes of its output.
    """

    def __init__(self, path: list[str], left: Callable[[str, Tensor, int], None] | None = None) -> None:
        super().__init__()
        self.path, self.left = path, left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            leave_origin(result, self.path[-1] if self.path else "", _calling_line(sys._getframe(1)))
        return result


class WatchedGraph(fx.Interpreter):
    """Runs a graph node by node under a watcher. `layers` are names by the identity of their module."""

    def __init__(self, gm: fx.GraphModule, watcher: Watcher, layers: Mapping[str, str]) -> None:
        super().__init__(gm)
        self.watcher, self.layers = watcher, layers
        self.running: tuple[str, Tensor | None, int] = ("", None, 0)

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr"):
            return super().run_node(n)
        self.watcher.path[:] = [layer_path(n)]
        layer = "" if n.op == "output" else self._layer(n)
        if layer != self.running[0]:
            self._leave()
            self.running = (layer, None, 0)
        if layer and self.running[1] is None:
            self.running = (layer, self._first_activation(n), 0)
        result = super().run_node(n)
        if n.op != "output":
            if torch.is_grad_enabled():
                leave_origin(result, layer_path(n), source_line(n))
            if layer:
                size = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
                self.running = (layer, self.running[1], size)
        return result

    def _first_activation(self, n: fx.Node) -> Tensor | None:
        leaves = tree_leaves(self.fetch_args_kwargs_from_env(n))
        return next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)

    def _layer(self, n: fx.Node) -> str:
        stack = reversed(n.meta.get("nn_module_stack", {}))
        return next((self.layers[identity] for identity in stack if identity in self.layers), "")

    def _leave(self) -> None:
        layer, x, size = self.running
        if layer and x is not None and self.watcher.left is not None:
            self.watcher.left(layer, x, size)


def leave_origin(result: Any, layer: str, source: str) -> None:
    """Writes an origin on the autograd nodes behind a result that have none yet."""
    ahead: list[Any] = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor)]
    while ahead:
        node = ahead.pop()
        if node is None or ORIGIN in node.metadata:
            continue
        node.metadata[ORIGIN] = (layer, source)
        ahead.extend(following for following, _ in node.next_functions)


def _calling_line(frame: FrameType | None) -> str:
    """The nearest line of Python outside torch and this package."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_USERS) and not file.startswith("<"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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
