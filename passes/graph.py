"""Capture and rewrite of one container: its own Python as an FX graph, its children as leaves.

Children stay module calls, so their hooks, modes and names survive, and a container that cannot be traced stays Python
while the ones inside it are traced on their own. A trace is used only if it can be trusted to mean what the Python
means: it must not have touched the module, drawn a random number, or frozen a tensor into the graph. Arguments with a
default are traced as that default; a call that passes another value runs the Python.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.layers import FUNCTIONS, METHODS, PRODUCTS, run_function, signature_of
from surgeon_fx.ratio_table import RatioTable


class Untraceable(Exception):
    """Why a container stays Python."""


class LayerTracer(fx.Tracer):
    """Every child module is a leaf."""

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
    before = dict(module.__dict__), random.getstate(), torch.get_rng_state()
    module.__dict__.pop("forward", None)  # trace the class's own
    try:
        graph = LayerTracer().trace(module, concrete_args=optional or None)
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    finally:
        touched = {k for k, v in module.__dict__.items() if before[0].get(k, fx) is not v} - {"forward"}
        module.__dict__.clear()
        module.__dict__.update(before[0])
        drew = random.getstate() != before[1] or not torch.equal(torch.get_rng_state(), before[2])
        random.setstate(before[1])
        torch.set_rng_state(before[2])
    if touched:
        raise Untraceable(f"its forward sets {', '.join(sorted(touched))}")
    if drew:
        raise Untraceable("its forward draws random numbers outside tensor operations")
    return graph


def kind_of(node: fx.Node) -> str | None:
    """The policy a node wants, if any."""
    if node.op == "call_function":
        if node.target in PRODUCTS:
            return "prune" if all(isinstance(a, fx.Node) for a in node.args) and len(node.args) == 2 else None
        return FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return METHODS.get(node.target) if node.op == "call_method" else None  # type: ignore[arg-type]


def tag_saves_pass(graph: fx.Graph, owner: Callable[[fx.Node], str | None]) -> int:
    """Writes into `meta` which policy a functional node runs under and whose ratio it follows. Returns how many."""
    tagged = 0
    for node in graph.nodes:
        if kind := kind_of(node):
            node.meta["surgeon_fx"] = (kind, owner(node))
            tagged += 1
    return tagged


def rewrite_functions_pass(gm: fx.GraphModule) -> PassResult:
    """Turns every tagged node into the same call under its policy."""
    tagged = [node for node in gm.graph.nodes if "surgeon_fx" in node.meta]
    for node in tagged:
        kind, owner = node.meta["surgeon_fx"]
        name = f"Tensor.{node.target}" if node.op == "call_method" else name_of(node.target)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(run_tagged, (kind, owner, name, *node.args), node.kwargs)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    if tagged:
        gm.graph.lint()
        gm.recompile()
    return PassResult(gm, bool(tagged))


_tables: list[RatioTable] = []  # of the containers whose graphs are running, innermost last


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


_by_name: dict[str, Callable[..., Any]] = {
    **{name_of(function): function for function in (*FUNCTIONS, *PRODUCTS)},
    **{f"Tensor.{method}": getattr(torch.Tensor, method) for method in METHODS},
}


def run_tagged(kind: str, owner: str | None, function: str, *args: Any, **kwargs: Any) -> Any:
    """A rewritten node: a function, by name because a graph can print that, under its policy."""
    return run_function(kind, _tables[-1][owner] if owner is not None else 0.0, _by_name[function], *args, **kwargs)


class GraphForward:
    """The forward of a rewritten container: its graph, or its Python where the graph does not apply."""

    def __init__(self, module: nn.Module, owners: dict[str, str], fallback: str | None, table: RatioTable) -> None:
        self.module, self.owners, self.fallback, self.table = module, owners, fallback, table
        self.graphs: dict[bool, fx.GraphModule | None] = {}
        self.reasons: dict[bool, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "graphs": {}, "reasons": {}}  # traced again where it is unpacked

    def graph(self, training: bool) -> fx.GraphModule | None:
        """The rewritten graph for a mode; None where the Python is as good, or cannot be traced."""
        if training not in self.graphs:
            mode = self.module.training
            self.module.training = training
            try:
                graph = capture(self.module)
                self.graphs[training] = self._rewrite(graph)
            except Untraceable as reason:
                self.graphs[training], self.reasons[training] = None, str(reason)
            finally:
                self.module.training = mode
        return self.graphs[training]

    def _rewrite(self, graph: fx.Graph) -> fx.GraphModule | None:
        if not tag_saves_pass(graph, self._owner):
            return None
        if any(node.op == "get_attr" and str(node.target).startswith("_tensor_constant") for node in graph.nodes):
            raise Untraceable("a tensor made in its forward would be frozen")
        result = rewrite_functions_pass(fx.GraphModule(self.module, graph))
        return result.graph_module

    def _owner(self, node: fx.Node) -> str | None:
        """The layer whose ratio a function follows: the nearest before it in the graph, else in the model."""
        earlier = node.prev
        while earlier.op != "root":
            if earlier.op == "call_module" and earlier.target in self.owners:
                return self.owners[str(earlier.target)]
            earlier = earlier.prev
        return self.fallback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        native = type(self.module).forward
        if not torch.is_grad_enabled():
            return native(self.module, *args, **kwargs)
        graph = self.graph(self.module.training)
        if graph is None:
            return native(self.module, *args, **kwargs)
        signature = signature_of(native)
        bound = signature.bind(self.module, *args, **kwargs)
        required = []
        for name, parameter in list(signature.parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                return native(self.module, *args, **kwargs)
            if parameter.default is not parameter.empty:
                if bound.arguments.get(name, parameter.default) is not parameter.default:
                    return native(self.module, *args, **kwargs)
            else:
                required.append(bound.arguments[name])
        _tables.append(self.table)
        try:
            return type(graph).forward(self.module, *required)  # the graph's code, on the module itself
        finally:
            _tables.pop()
