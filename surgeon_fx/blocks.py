"""The blocks of a network: the units of gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost repeated parts that hold two layers or more: residual blocks, transformer blocks, stages."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            own = [m for m in child.modules() if next(iter(m._parameters.values()), None) is not None]
            if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and len(own) > 1:
                found[path] = child
            else:
                visit(child, path)

    visit(model, "")
    return found


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Gradient checkpointing with a block as the unit: each keeps its inputs alone and runs again in backward."""

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks(model).values():
        block.forward = checkpointed(block.forward)
    return model
