"""A model sharded by `fully_shard`, as it is while it runs: whole, in the precision it is gathered in."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from surgeon_fx.api import MARK, copy_structure
from surgeon_fx.distributed import is_sharded, sharded_parts
from surgeon_fx.runtime import Forward, Named


def gathered_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """What parameters are cast to as they are gathered, by their identity."""
    found: dict[int, torch.dtype] = {}
    for part in reversed(sharded_parts(model)):  # inner ones first: they own what is theirs
        if (dtype := _policy(part).param_dtype) is not None:
            for parameter in part.parameters():
                found.setdefault(id(parameter), dtype)
        else:
            for parameter in part.parameters():
                found.setdefault(id(parameter), parameter.dtype)
    return found


def without_sharding(model: nn.Module) -> nn.Module:
    """A copy over the same parameters that gathers nothing, and casts what a sharded model casts."""
    if not sharded_parts(model):
        return model
    result = copy_structure(model)
    for name, original in model.named_modules():
        if not is_sharded(original):
            continue
        part, policy = result.get_submodule(name), _policy(original)
        part.__class__ = type(part).__mro__[2]  # FSDP gave it a class made of its own and the module's
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_fsdp(hook)]:
                del hooks[key]
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            part.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), prepend=True, with_kwargs=True)
        if policy.output_dtype is not None:
            part.register_forward_hook(partial(_cast_output, policy.output_dtype))
    for module in result.modules():  # which Dynamo looks at
        for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(attribute, None)
        for attribute in [key for key in module.__dict__ if key.startswith("__composable_api")]:
            del module.__dict__[attribute]  # FSDP's state, which refers to the model
    if MARK in result.__dict__:
        _take_over_forwards(result)
    return result


def _take_over_forwards(result: nn.Module) -> None:
    """Has the forwards of a copied model run the copy."""
    rewrite = result.__dict__[MARK] = copy.copy(result.__dict__[MARK])
    rewrite.module = result
    rewrite.layers = {name: result.get_submodule(name) for name in rewrite.layers}
    for module in result.modules():
        if isinstance(forward := module.__dict__.get("forward"), Forward | Named):
            module.__dict__["forward"] = replace(forward, module=module, rewrite=rewrite)


def _policy(part: nn.Module) -> Any:
    return part._get_fsdp_state()._mp_policy  # type: ignore[operator]


def _is_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("torch.distributed.fsdp")


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)
