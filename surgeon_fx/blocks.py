"""The blocks of a network: the units of gradient checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList)


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
