"""`torch.cat`, part by part: each part is copied into the result as soon as it is there, and waits for no other.

Reference: `torch.cat`. Values, gradients and layout are the same; `passes/join_early.py` says where it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format


class Join(torch.autograd.Function):
    """Copies a part into the result, in place."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
        ctx.place = dim, start, part.shape[dim]
        joined.narrow(*ctx.place).copy_(part)
        ctx.mark_dirty(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wants_joined, wants_part, *_ = ctx.needs_input_grad
        part = grads[0].narrow(*ctx.place) if wants_part else None
        return grads[0] if wants_joined else None, part, None, None  # parts read places of their own


def begin_join(part: Tensor, dim: int, start: int, total: int) -> Tensor:
    """A result of so many elements along `dim`, with its first part in its place."""
    shape = [*part.shape[:dim], total, *part.shape[dim + 1 :]]
    layout = suggest_memory_format(part)
    return join(torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout), part, dim, start)


def join(joined: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    """`joined`, with the next part in its place; contiguous as soon as two parts differ in layout, as torch has it."""
    if suggest_memory_format(part) is not suggest_memory_format(joined):
        joined = joined.contiguous()
    found: Tensor = Join.apply(joined, part, dim, start)
    return found
