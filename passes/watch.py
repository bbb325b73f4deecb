"""Watching a forward: autograd's nodes learn the module and the line of source that made them.

`explain` and the planner read them off the graph afterwards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
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
            leave_origin(result, self.path[-1] if self.path else "", _line(calling_frame(sys._getframe(1))))
        return result


class WatchedGraph(fx.Interpreter):
    """Runs a graph node by node under a watcher. `names` are those of modules, by their identity."""

    def __init__(self, gm: fx.GraphModule, watcher: Watcher, names: Mapping[str, str], layers: Container[str]) -> None:
        super().__init__(gm)
        self.watcher, self.names, self.layers = watcher, names, layers
        self.running: tuple[str | None, Tensor | None, int] = (None, None, 0)  # layer, its input, bytes of its output

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = getattr(self, n.op)
        if n.op in ("placeholder", "get_attr"):
            return call(n.target, args, kwargs)
        running = [self.names[one] for one in modules_around(n) if one in self.names]
        self.watcher.path[:] = [path := running[-1] if running else ""]
        around = "" if "" in self.layers else None  # a model that is a layer is around all
        layer = next((name for name in reversed(running) if name in self.layers), around) if n.op != "output" else None
        if layer != self.running[0]:
            self._leave()
            self.running = (layer, None, 0)
        if layer is not None and self.running[1] is None:
            given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point())
            self.running = (layer, next(given, None), 0)
        result = call(n.target, args, kwargs)
        if n.op != "output":
            if torch.is_grad_enabled():
                leave_origin(result, path, source_line(n))
            if layer is not None:
                size = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
                self.running = (layer, self.running[1], size)
        return result if n.users or n.op == "output" else None  # what nobody reads is gone at once

    def _leave(self) -> None:
        layer, x, size = self.running
        if layer is not None and x is not None and self.watcher.left is not None:
            self.watcher.left(layer, x, size)


def leave_origin(result: Any, layer: str, source: str) -> None:
    """Writes an origin on the autograd nodes behind a result that have none yet."""
    results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
    ahead: list[Any] = [x.grad_fn for x in results if isinstance(x, Tensor)]
    while ahead:
        node = ahead.pop()
        if node is None or ORIGIN in node.metadata:
            continue
        node.metadata[ORIGIN] = (layer, source)
        ahead.extend(following for following, _ in node.next_functions)


def calling_frame(frame: FrameType | None, inside: CodeType | None = None) -> FrameType | None:
    """The nearest frame of Python outside torch and this package, if it was called from the code `inside`."""
    while frame is not None and not _users_file(frame.f_code.co_filename):
        frame = None if frame.f_code is inside else frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{_users_file(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _users_file(file: str) -> str:
    """The name of a file outside torch and this package; empty for any other."""
    return "" if file.startswith((*NOT_USERS, "<")) else Path(file).name


def modules_around(node: fx.Node) -> list[str]:
    """Identities of the modules that a captured node ran in; Dynamo tells the calls of one module apart by a suffix."""
    return [identity.partition("@")[0] for identity in node.meta.get("nn_module_stack", ())]


def source_line(node: fx.Node) -> str:
    """File and line that a captured node was written in, outside torch and this package."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for file, line in reversed(lines):
        if name := _users_file(file):
            return f"{name}:{line}"
    return ""
