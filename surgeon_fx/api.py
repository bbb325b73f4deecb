"""`transform`: a drop-in copy of a model that keeps less for backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from surgeon_fx.allocator import return_freed_memory
from surgeon_fx.config import Config
from surgeon_fx.ops.layers import PRUNABLE, LayerForward, module_kind
from surgeon_fx.passes.graph import GraphForward
from surgeon_fx.ratio_table import RatioTable

TABLE = "_surgeon_fx_ratios"


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
    if TABLE in model.__dict__:
        raise ValueError("model is already transformed; change its ratios through surgeon_fx.ratios(model)")
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    allowed = {name: m for name, m in model.named_modules() if filter_fn is None or filter_fn(m, name)}
    chosen = {name: kind for name, module in allowed.items() if (kind := module_kind(module))}
    prunable = [name for name, module in allowed.items() if isinstance(module, PRUNABLE)]
    if config.return_freed_memory:
        return_freed_memory()
    if not chosen and not prunable:
        warnings.warn("surgeon_fx.transform found nothing to rewrite", NoEffectWarning, stacklevel=2)
    table = RatioTable(prunable)
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            new = copies[id(module)] = module.__new__(type(module))
            new.__dict__.update(module.__dict__)
            for part in ("_parameters", "_buffers"):
                new.__dict__[part] = dict(module.__dict__[part])
            new.__dict__["_modules"] = {k: None if m is None else copy(m) for k, m in module._modules.items()}
        return copies[id(module)]

    result = copy(model)
    before: str | None = None
    for module in model.modules():
        name, new = names[id(module)], copies[id(module)]
        before = name if name in table else before
        if name in chosen:
            new.__dict__["forward"] = LayerForward(new, chosen[name], before, table)
        elif "forward" not in module.__dict__ and not type(module).forward.__module__.startswith("torch.nn"):
            new.__dict__["forward"] = GraphForward(new, _owners(module, name, table), before, table)
    result.__dict__[TABLE] = table
    return result


def _owners(module: nn.Module, name: str, table: RatioTable) -> dict[str, str]:
    """For each path below a module that its graph can call: the last layer in there that has a ratio."""
    owners: dict[str, str] = {}
    for path, _ in module.named_modules():
        if (layer := f"{name}.{path}" if name else path) in table:
            parts = path.split(".")
            owners |= {".".join(parts[: i + 1]): layer for i in range(len(parts)) if path}
    return owners


def ratios(model: nn.Module) -> RatioTable:
    """The ratio table of a transformed model."""
    table = model.__dict__.get(TABLE) if isinstance(model, nn.Module) else None
    if table is None:
        raise ValueError("model is not transformed: call surgeon_fx.transform(model) first")
    return table
