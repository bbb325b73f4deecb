"""The parts of a network that have a name: layers, norm layers, and blocks, the units of gradient checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LAYERS = (_ConvNd, nn.Linear, *NORM_LAYERS, nn.MultiheadAttention)
NOT_LAYERS = (nn.PReLU, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)
CONTAINERS = (nn.Sequential, nn.ModuleList)
Trains = str | Callable[[str, nn.Parameter], bool] | None


def is_layer(module: nn.Module) -> bool:
    """Whether a module has a row in the ratio table: a conv, linear or norm layer, torch's or one written like it.

    Written like it means: without modules inside, and owning a parameter called weight.
    """
    if isinstance(module, LAYERS):
        return True
    weight = module._parameters.get("weight")
    leaf = not module._modules and not isinstance(module, NOT_LAYERS)
    return leaf and weight is not None and weight.is_floating_point()


def is_norm_layer(module: nn.Module) -> bool:
    """Whether a layer normalises: one of torch's, or one written like it, whose weight is a vector."""
    if isinstance(module, NORM_LAYERS):
        return True
    return is_layer(module) and not isinstance(module, LAYERS) and module.weight.dim() == 1  # type: ignore[operator]


def trains(model: nn.Module, which: Trains) -> Callable[[str, nn.Parameter], bool]:
    """Which parameters are trained: "all", those of norm layers ("norm"), a function's choice, or what requires it."""
    if which is None:
        return lambda name, parameter: parameter.requires_grad
    if which == "all":
        return lambda name, parameter: True
    if which == "norm":
        owners = dict(model.named_modules())
        return lambda name, parameter: is_norm_layer(owners[name.rpartition(".")[0]])
    if callable(which):
        return which
    raise ValueError(f"train must be 'all', 'norm' or a function of name and parameter, got {which!r}")


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost repeated parts that hold two layers or more: residual blocks, transformer blocks, stages."""
    found: dict[str, nn.Module] = {}
    wrapper = sum(_layers(child) > 1 for child in model.children()) == 1  # a normaliser and the network, as one

    def visit(module: nn.Module, name: str) -> None:
        repeated = isinstance(module, CONTAINERS) and not (wrapper and module is model)
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if repeated and not isinstance(child, CONTAINERS) and _layers(child) > 1:
                if all(child is not other for other in found.values()):
                    found[path] = child
            else:
                visit(child, path)

    visit(model, "")
    return found


def last_stage(model: nn.Module) -> set[str]:
    """Names of the modules from the last stage on: the last of several rows of blocks, or the last quarter of one."""
    names = list(blocks(model))
    rows = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if len(rows) > 1:
        first = next(name for name in names if name.rpartition(".")[0] == rows[-1])
    elif len(names) >= 4:
        first = names[-(len(names) // 4)]
    else:
        return set()
    every = [name for name, _ in model.named_modules()]
    return set(every[every.index(first) :])


def _layers(module: nn.Module) -> int:
    return sum(next(iter(part._parameters.values()), None) is not None for part in module.modules())


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Gradient checkpointing with a block as the unit: each keeps its inputs alone and runs again in backward."""

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks(model).values():
        block.forward = checkpointed(block.forward)
    return model


@contextlib.contextmanager
def checkpointed_blocks(model: nn.Module) -> Iterator[None]:
    """`checkpoint_blocks`, and back to how it was."""
    before = [(block, block.__dict__.get("forward")) for block in blocks(model).values()]
    try:
        checkpoint_blocks(model)
        yield
    finally:
        for block, forward in before:
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.__dict__["forward"] = forward
