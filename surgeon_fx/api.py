"""`transform`: a drop-in copy of a model that keeps less for backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from surgeon_fx.allocator import return_freed_memory
from surgeon_fx.config import Config
from surgeon_fx.ops.layers import LayerForward, has_ratio, module_kind
from surgeon_fx.ops.runtime import Rewrite
from surgeon_fx.passes.graph import GraphForward
from surgeon_fx.passes.pipeline import passes_for
from surgeon_fx.ratio_table import RatioTable

MARK = "_surgeon_fx"  # where a transformed model keeps its Rewrite
PLAIN = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Embedding,
)  # no functions


class NoEffectWarning(UserWarning):
    """Nothing in the model was rewritten."""


def transform(
    model: nn.Module, config: Config | None = None, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """A copy of the model's structure, over the same parameters and buffers, that keeps less for backward.

    Ratios start at 0, where loss and every gradient equal the model's to the bit; `surgeon_fx.ratios` changes them.
    `filter_fn(module, name)` says which layers may be rewritten. The model itself is left as it is.
    """
    config = config or Config()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":  # its forward is fixed, and would be that of the model itself
            raise ValueError("model is compiled: transform it first, then call torch.compile on the result")
        if MARK in module.__dict__:
            what = f"its part {name}" if name else "model"
            raise ValueError(f"{what} is already transformed; change its ratios through surgeon_fx.ratios(...)")
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    allowed = {name: m for name, m in model.named_modules() if filter_fn is None or filter_fn(m, name)}
    chosen = {name: kind for name, module in allowed.items() if (kind := module_kind(module))}
    shared = Rewrite(RatioTable(name for name, module in allowed.items() if has_ratio(module)))
    if config.return_freed_memory:
        return_freed_memory()
    if not chosen and not shared.table:
        warnings.warn("surgeon_fx.transform found nothing to rewrite", NoEffectWarning, stacklevel=2)
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # not ours to open
            copies[id(module)] = module
        if id(module) not in copies:
            new = copies[id(module)] = module.__new__(type(module))
            new.__dict__.update(module.__dict__)
            for key, value in module.__dict__.items():  # parameters, buffers, hooks: the copy has its own lists of them
                if key.startswith("_") and isinstance(value, (dict, set)):
                    new.__dict__[key] = value.copy()
            new.__dict__["_modules"] = {k: None if m is None else copy(m) for k, m in module._modules.items()}
        return copies[id(module)]

    def follow(value: Any) -> Any:
        """What an attribute refers to, among the copies: modules kept in plain lists, bound methods."""
        if isinstance(value, nn.Module):
            return copies.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in copies:
            return MethodType(value.__func__, copies[id(value.__self__)])
        if type(value) in (list, tuple):
            return type(value)(follow(item) for item in value)
        if type(value) is dict:
            return {key: follow(item) for key, item in value.items()}
        return value

    result, passes = copy(model), passes_for(config)
    for new in copies.values():
        for key, value in new.__dict__.items():
            if not key.startswith("_") and not key.endswith("_hooks") and _refers(value):
                new.__dict__[key] = follow(value)
    shared.layers = {name: copies[id(allowed[name])] for name in shared.table}
    for module in model.modules():
        name, new, root = names[id(module)], copies[id(module)], module is model
        layer = name if name in shared.table else None
        own = new.__dict__.get("forward")
        if new is module or (own is not None and not isinstance(own, MethodType)):
            continue  # somebody else's
        if own is not None:
            new.__dict__["forward"] = GraphForward(new, layer, passes, shared, root, own.__func__)
        elif name in chosen:
            new.__dict__["forward"] = LayerForward(new, chosen[name], layer, shared, root)
        elif root or type(module).forward not in {plain.forward for plain in PLAIN}:
            new.__dict__["forward"] = GraphForward(new, layer, passes, shared, root)
    result.__dict__[MARK] = shared
    return result


def _refers(value: Any) -> bool:
    """Whether a value may refer to a module of the model."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, (nn.Module, MethodType)) or any(_refers(item) for item in items)


def is_transformed(model: Any) -> bool:
    """Whether a model is one that `transform` made."""
    return isinstance(model, nn.Module) and MARK in model.__dict__


def ratios(model: nn.Module) -> RatioTable:
    """The ratio table of a transformed model."""
    shared = model.__dict__.get(MARK) if isinstance(model, nn.Module) else None
    if shared is None:
        raise ValueError("model is not transformed: call surgeon_fx.transform(model) first")
    return shared.table
