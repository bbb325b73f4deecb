"""Capture and rewrite of one container: its own Python as an FX graph, its children as leaves.

Children stay module calls, so their hooks, modes and names survive, and a container that cannot be traced stays Python
while the ones inside it are traced on their own. A trace is used only if it can be trusted to mean what the Python
means: it must not have touched the module, drawn a random number, or frozen a tensor into the graph. Arguments with a
default are traced as that default; a call that passes another value runs the Python.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from surgeon_fx.ops.layers import FunctionMode, signature_of
from surgeon_fx.ops.runtime import Rewrite, state
from surgeon_fx.passes.pipeline import Pass, rewrite

PARTS = ("_parameters", "_buffers", "_modules")
SOURCE = "surgeon_fx_source"  # in a node's meta: file and line
HERE = f"{Path(__file__).parent}{os.sep}"
TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class Untraceable(Exception):
    """Why a container stays Python."""


class LayerProxy(fx.Proxy):
    """Stands for a value. Python that asks what type it has would be told wrong, so it is not traced."""

    @property  # type: ignore[misc]  # what isinstance looks at when the type itself does not match
    def __class__(self) -> type:
        if not sys._getframe(1).f_code.co_filename.startswith(TORCH):
            raise Untraceable("its forward asks for the type of a value")
        return fx.Proxy


class LayerTracer(fx.Tracer):
    """Every child module is a leaf. Nodes remember the source line they stand for."""

    proxy_buffer_attributes = True  # a buffer may change: its value is no part of the graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, HERE)):
            frame = frame.f_back
        node.meta[SOURCE] = (frame.f_code.co_filename, frame.f_lineno)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return LayerProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.path_of_module(m):
            raise Untraceable("it calls itself")
        return super().call_module(m, forward, args, kwargs)


def capture(module: nn.Module) -> fx.Graph:
    """The graph of a container's own forward, in its present mode. Untraceable with the reason where there is none."""
    forward = type(module).forward
    optional = {
        name: parameter.default
        for name, parameter in signature_of(forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    before, parts = dict(module.__dict__), {part: dict(module.__dict__[part]) for part in PARTS}
    generators = random.getstate(), torch.get_rng_state()
    module.__dict__.pop("forward", None)  # trace the class's own
    try:
        with _watched():
            graph = LayerTracer().trace(module, concrete_args=optional or None)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    finally:
        touched = {k for k, v in module.__dict__.items() if before.get(k, fx) is not v} - {"forward"}
        touched |= {k for part in PARTS for k, v in module.__dict__[part].items() if parts[part].get(k, fx) is not v}
        module.__dict__.clear()
        module.__dict__.update(before)
        for part in PARTS:
            module.__dict__[part].clear()
            module.__dict__[part].update(parts[part])
        drew = random.getstate() != generators[0] or not torch.equal(torch.get_rng_state(), generators[1])
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])
    if touched:
        raise Untraceable(f"its forward sets {', '.join(sorted(touched))}")
    if drew:
        raise Untraceable("its forward draws random numbers outside tensor operations")
    return graph


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """While tracing: what takes effect in Python and would be missing from the graph ends the trace."""

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise Untraceable(f"its forward {what}")

        return refused

    modes = "changes the gradient or precision mode"
    watched: list[tuple[Any, str, Any]] = [
        (torch.autograd.Function, "apply", classmethod(refuse("calls a custom autograd function"))),
        (torch._C, "_set_grad_enabled", refuse(modes)),
        (torch.inference_mode, "__enter__", refuse(modes)),
        (torch.autocast, "__enter__", refuse(modes)),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", refuse("sets hooks on saved tensors")),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in watched]
    for owner, name, value in watched:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class GraphForward:
    """The forward of a rewritten container: its graph, or its Python where the graph does not apply."""

    def __init__(
        self,
        module: nn.Module,
        name: str | None,
        passes: tuple[Pass, ...],
        shared: Rewrite,
        outermost: bool,
        own: Callable[..., Any] | None = None,
    ) -> None:
        self.module, self.name, self.passes, self.shared, self.outermost = module, name, passes, shared, outermost
        self.own = own  # a forward set on the instance, which FX would not look at
        self.graphs: dict[bool, fx.GraphModule | None] = {}
        self.reasons: dict[bool, str] = {}

    @property
    def native(self) -> Callable[..., Any]:
        return self.own or type(self.module).forward

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        new = memo[id(self)] = type(self).__new__(type(self))
        shared = {"graphs": dict(self.graphs), "reasons": dict(self.reasons)}  # code, which runs on any module
        for key, value in self.__dict__.items():
            new.__dict__[key] = shared[key] if key in shared else copy.deepcopy(value, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "graphs": {}, "reasons": {}}  # traced again where it is unpacked

    def graph(self, training: bool) -> fx.GraphModule | None:
        """The rewritten graph for a mode; None where it cannot be traced, with the reason."""
        if training not in self.graphs:
            mode = self.module.training
            self.module.training = training
            try:
                if self.own is not None:
                    raise Untraceable("its forward is set on the instance")
                with _disable_current_modes():  # a trace is no part of what they watch
                    found = fx.GraphModule(self.module, capture(self.module))
                    self.graphs[training] = rewrite(found, self.passes)
            except Untraceable as reason:
                self.graphs[training], self.reasons[training] = None, str(reason)
            finally:
                self.module.training = mode
        return self.graphs[training]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or state.policies:
            return self.native(self.module, *args, **kwargs)
        return self.shared.session(self.outermost, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.name is not None:
            self.shared.running = self.name
        native = self.native
        graph = self.graph(self.module.training)
        required = None if graph is None else self._required(native, args, kwargs)
        if graph is None or required is None:
            with FunctionMode():
                return native(self.module, *args, **kwargs)
        return type(graph).forward(self.module, *required)  # the graph's code, on the module itself

    def _required(self, native: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
        """The arguments of the graph; None for a call it was not traced for."""
        signature = signature_of(native)
        bound = signature.bind(self.module, *args, **kwargs)
        required = []
        for name, parameter in list(signature.parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                return None
            if parameter.default is not parameter.empty:
                if bound.arguments.get(name, parameter.default) is not parameter.default:
                    return None
            else:
                required.append(bound.arguments[name])
        return required
