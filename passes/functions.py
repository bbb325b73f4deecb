"""Functional calls: each one of the registry becomes the same call under its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from surgeon_fx.ops.layers import FUNCTIONS, METHODS, PRODUCTS, FunctionMode, run_function


def rewrite_functions(gm: fx.GraphModule) -> bool:
    """Calls of the registry run under their policies; helpers traced as one call run in a mode that does the same."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_method" and node.target in METHODS:
            function = METHODS[node.target]
        elif node.op == "call_function" and (node.target in FUNCTIONS or _is_helper(node.target)):
            function = node.target
        else:
            continue
        if function in PRODUCTS and sum(isinstance(a, fx.Node) for a in (*node.args, *node.kwargs.values())) < 2:
            continue  # by a number: nothing is saved
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(rewritten(function), node.args, node.kwargs)
        new.meta = node.meta
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        changed = True
    return changed


def _is_helper(function: Any) -> bool:
    """Python of a library that FX was told to take as one call: what it calls is not in the graph."""
    module = getattr(function, "__module__", None) or ""
    return hasattr(function, "__code__") and module.split(".")[0] not in ("torch", "surgeon_fx", "_operator", "math")


_rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under its policy, with a name that generated code can print."""
    if function not in _rewritten:

        def call(*args: Any, **kwargs: Any) -> Any:
            if function in FUNCTIONS:
                return run_function(function, *args, **kwargs)
            with FunctionMode():
                return function(*args, **kwargs)

        call.__name__ = call.__qualname__ = f"saving_{function.__name__}"
        _rewritten[function] = call
    return _rewritten[function]
