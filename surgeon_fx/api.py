"""`transform`: a drop-in copy of a model that keeps less for backward, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from surgeon_fx.allocator import return_freed_memory
from surgeon_fx.backend import open_door
from surgeon_fx.config import Config
from surgeon_fx.distributed import check_wrappers, is_wrapped
from surgeon_fx.modules import is_layer
from surgeon_fx.ratio_table import RatioTable
from surgeon_fx.runtime import Forward, Named, Rewrite

MARK = "_surgeon_fx"  # where a transformed model keeps its Rewrite


class NoEffectWarning(UserWarning):
    """Nothing in the model was rewritten."""


def transform(
    model: nn.Module, config: Config | None = None, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """A copy of the model's structure, over the same parameters and buffers, that keeps less for backward.

    Ratios start at 0, where loss and every gradient equal the model's to the bit; `surgeon_fx.ratios` changes them.
    `filter_fn(module, name)` says which layers may be rewritten. The model itself is left as it is.
    """
    check_model(model)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a surgeon_fx.Config, got {type(config).__name__}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function of a module and its name, got {type(filter_fn).__name__}")
    result = copy_structure(model)
    rewrite = install(result, config or Config(), filter_fn)
    if is_wrapped(model):
        rewrite.original = model  # which DistributedDataParallel refers to weakly
    return result


def check_model(model: nn.Module) -> None:
    """Raises where a model cannot be transformed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "model is a torch.jit one, whose code cannot be captured: transform the model it was made from"
        )
    check_wrappers(model)
    for name, module in model.named_modules():
        what = f"its part {name}" if name else "model"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(f"{what} is compiled: transform it first, then call torch.compile on the result")
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise ValueError(f"{what} is lazy, and has no weights yet: run the model once, then transform it")
        if MARK in module.__dict__:
            raise ValueError(f"{what} is already transformed; change its ratios through surgeon_fx.ratios(...)")


def install(result: nn.Module, config: Config, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> Rewrite:
    """Gives a model our forwards, in place; `uninstall` takes them away again."""
    layers = [name for name, module in result.named_modules() if is_layer(module)]
    chosen = [n for n in layers if filter_fn is None or filter_fn(result.get_submodule(n), n)]
    if config.return_freed_memory:
        return_freed_memory()
    if not chosen:
        warnings.warn("surgeon_fx.transform found nothing to rewrite", NoEffectWarning, stacklevel=3)
    rewrite = Rewrite(result, {name: result.get_submodule(name) for name in chosen}, set(layers) - set(chosen), config)
    for name, module in rewrite.layers.items():
        if not _has_one_function(module) and "forward" not in module.__dict__:
            module.__dict__["forward"] = Named(module, rewrite, name)
    for module in (result, *result.children()):  # parts may be called on their own
        own = module.__dict__.get("forward")
        if isinstance(module, torch.jit.ScriptModule) or (own is not None and not isinstance(own, MethodType | Named)):
            continue  # somebody else's
        module.__dict__["forward"] = Forward(module, rewrite, own.__func__ if isinstance(own, MethodType) else None)
    result.__dict__[MARK] = rewrite
    return rewrite


def _has_one_function(layer: nn.Module) -> bool:
    """Whether a layer is one call that its weight belongs to, as torch's own are."""
    native = next((t for t in type(layer).__mro__ if t.__module__.startswith("torch.nn")), None)
    return layer._parameters.get("weight") is not None and type(layer).forward is getattr(native, "forward", None)


def copy_structure(model: nn.Module) -> nn.Module:
    """New modules over the same parameters and buffers."""
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # not ours to open
            copies[id(module)] = module
        if id(module) not in copies:
            new = copies[id(module)] = object.__new__(type(module))
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

    result = copy(model)
    for new in copies.values():
        for key, value in new.__dict__.items():
            if not key.startswith("_") and not key.endswith("_hooks") and _refers(value):
                new.__dict__[key] = follow(value)
    return result


def _refers(value: Any) -> bool:
    """Whether a value may refer to a module of the model."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, (nn.Module, MethodType)) or any(_refers(item) for item in items)


def restore(model: nn.Module) -> nn.Module:
    """A plain module over the live parameters and buffers of a transformed one."""
    result = copy_structure(transformed_part(model))
    uninstall(result, in_place=False)
    return result


def uninstall(result: nn.Module, in_place: bool = True) -> None:
    """Takes our forwards away from a transformed model; `in_place`, those who hold one of them run the native one."""
    result.__dict__.pop(MARK).retired = in_place
    for module in result.modules():
        if isinstance(forward := module.__dict__.get("forward"), Forward | Named):
            del module.__dict__["forward"]
            if isinstance(forward, Forward) and forward.own is not None:
                module.__dict__["forward"] = MethodType(forward.own, module)


def transformed_part(model: nn.Module) -> nn.Module:
    """The transformed model itself, or the one inside a wrapper (DDP, FSDP, peft, Lightning, accelerate, compiled)."""
    if isinstance(model, nn.Module):
        found = [(name, module) for name, module in model.named_modules() if MARK in module.__dict__]
        if len(found) == 1:
            return found[0][1]
        if found:
            raise ValueError(
                f"model holds several transformed ones: pass one of {', '.join(name for name, _ in found)}"
            )
        if open_door(model) is not None:
            raise ValueError(
                'model is not transformed but compiled with backend="surgeon_fx": model._orig_mod is as it was'
            )
    raise ValueError("model is not transformed: call surgeon_fx.transform(model) first")


def behind_door(model: nn.Module) -> nn.Module:
    """A transformed twin, at the same ratios, of a model compiled with the backend "surgeon_fx"; any other as it is."""
    if not isinstance(model, nn.Module) or (door := open_door(model)) is None:
        return model
    twin = copy_structure(door.module)
    install(twin, door.config).table.update(door.table)
    return twin


def is_transformed(model: nn.Module) -> bool:
    """Whether a model is transformed, or wraps one that is."""
    return any(MARK in module.__dict__ for module in model.modules())


def rewrite_of(model: nn.Module) -> Rewrite:
    """The state of a transformed model, or of one compiled with the backend "surgeon_fx"."""
    if isinstance(model, nn.Module) and (door := open_door(model)) is not None:
        return door
    return transformed_part(model).__dict__[MARK]


def ratios(model: nn.Module) -> RatioTable:
    """The ratio table of a transformed model, or of the one inside a wrapper."""
    return rewrite_of(model).table
