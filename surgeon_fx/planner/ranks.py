"""What one of several ranks holds: weights, gradients and optimizer state, whole or in shards, and activations."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from torch import Tensor, nn

from surgeon_fx.modules import blocks

SHARDINGS = ("none", "optimizer", "full")


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds through a training step of its own batch.

    `sharding`: "none" is `DistributedDataParallel`; "optimizer" is that with `ZeroRedundancyOptimizer`, of which the
    fullest rank counts; "full" is `fully_shard` (FSDP2). `communication` is what ranks exchange from: the buckets of
    gradients, or, fully sharded, the gathered weights of a block, of the next one, and the gradients of the first.
    """

    world_size: int
    sharding: str
    weights: int  # buffers included
    gradients: int
    optimizer: int
    communication: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.communication + self.activations

    def __str__(self) -> str:
        mib = 1 << 20
        parts = ("weights", "gradients", "optimizer", "communication", "activations")
        each = ", ".join(f"{part} {getattr(self, part) / mib:.1f}" for part in parts)
        return f"MiB of a rank of {self.world_size}, sharding {self.sharding!r}: {self.total / mib:.1f} = {each}"


def shard_bytes(x: Tensor, world_size: int) -> int:
    """A rank's part of a tensor that is cut along its first dimension, padded as the others' are."""
    first = x.shape[0] if x.dim() else 1
    return ceil(first / world_size) * prod(x.shape[1:]) * x.element_size()


def rank_memory(
    model: nn.Module,
    trained: Callable[[str, nn.Parameter], bool],
    activations: int,
    world_size: int,
    sharding: str,
    optimizer_states: int,
) -> RankMemory:
    """Arithmetic on the model's parameters; `activations` are those of the rank's own batch."""
    if world_size < 1:
        raise ValueError(f"world_size must be a number of ranks, 1 or more, got {world_size}")
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, got {sharding!r}")
    if optimizer_states < 0:
        raise ValueError(f"optimizer_states must be tensors per parameter (Adam: 2), got {optimizer_states}")
    parameters = dict(model.named_parameters())
    learnt = [p for name, p in parameters.items() if trained(name, p)]
    held = world_size if sharding == "full" else 1
    gradients = sum(shard_bytes(p, held) for p in learnt)
    if sharding == "full":
        communication = _gathered(model) if world_size > 1 else 0
    else:
        communication = gradients if world_size > 1 else 0
    return RankMemory(
        world_size=world_size,
        sharding=sharding,
        weights=sum(shard_bytes(p, held) for p in parameters.values()) + sum(b.nbytes for b in model.buffers()),
        gradients=gradients,
        optimizer=optimizer_states * (_most_of_parts(learnt, world_size) if sharding == "optimizer" else gradients),
        communication=communication,
        activations=activations,
    )


def _most_of_parts(parameters: list[nn.Parameter], world_size: int) -> int:
    """The largest part where whole parameters are dealt out, the largest first, to whoever has least."""
    loads = [0] * min(world_size, max(len(parameters), 1))
    for size in sorted(map(_bytes, parameters), reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def _gathered(model: nn.Module) -> int:
    """Weights of two neighbouring blocks, and the gradients of one: the most that is gathered at a time."""
    units = [sum(_bytes(p) for p in block.parameters()) for block in blocks(model).values()]
    rest = sum(_bytes(p) for p in model.parameters()) - sum(units)
    units.append(max(rest, 0))  # what is in no block is gathered with the model itself
    pairs = [2 * a + b for a, b in zip(units, [*units[1:], 0], strict=True)]
    return max(pairs, default=0)


def _bytes(parameter: nn.Parameter) -> int:
    return prod(parameter.shape) * parameter.element_size()
