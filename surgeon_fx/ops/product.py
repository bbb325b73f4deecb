"""Elementwise products and quotients of activations: gates, layer scale, normalisation written out.

Reference: the native gradients, with each operand that they read replaced by its pruned self. An operand much smaller
than the other gates all of it and is kept exactly; so is a parameter, and everything that is divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels.layout import FLOAT_BITS
from surgeon_fx.ops.common import is_parameter, needs_graph, reduce_to, run_exactly
from surgeon_fx.ops.keep import SMALL_BYTES, Kept, can_prune, restored, save
from surgeon_fx.ops.relu import clamp_min
from surgeon_fx.ops.slots import Slot, find_slot, mark

BROADCAST = 8  # an operand so many times smaller than the other is kept exactly


def _prunable(x: Tensor, other: Tensor) -> bool:
    return not is_parameter(x) and x.numel() * BROADCAST > other.numel()


class Multiply(torch.autograd.Function):
    """`value * a * b`, and `base` added to it where there is one. Each operand is kept for the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, base: Tensor | None, a: Tensor, b: Tensor, native: Any, value: float
    ) -> Tensor:
        ctx.shapes, ctx.value = (None if base is None else base.shape, a.shape, b.shape), value
        kept: list[Kept] = []
        exact: list[Tensor] = []
        ctx.kept_as = []
        for x, other in ((a, b), (b, a)):
            if not other.requires_grad:
                ctx.kept_as.append(None)
            elif _prunable(x, other):
                ctx.kept_as.append(("pruned", len(kept)))
                kept.append(Kept(slot, x, ratio))
            else:
                ctx.kept_as.append(("exact", len(exact)))
                exact.append(x.detach())
        save(ctx, kept, *exact)
        return native(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: dict[str, Any] = dict(zip(("pruned", "exact"), restored(ctx), strict=True))
        operands: list[Any] = [None if where is None else found[where[0]][where[1]] for where in ctx.kept_as]
        a, b = operands
        g = grads[0] if ctx.value == 1 else grads[0] * ctx.value
        _, _, wants_base, wants_a, wants_b, _, _ = ctx.needs_input_grad
        return (
            None,
            None,
            reduce_to(grads[0], ctx.shapes[0]) if wants_base else None,
            reduce_to(g * b, ctx.shapes[1]) if wants_a else None,
            reduce_to(g * a, ctx.shapes[2]) if wants_b else None,
            None,
            None,
        )


def _apart(x: Tensor, other: Tensor) -> Tensor:
    """A small operand that is part of something larger is copied, so that the larger can go."""
    small = not is_parameter(x) and (not _prunable(x, other) or x.nbytes <= SMALL_BYTES)
    return x.clone() if small and x.untyped_storage().nbytes() > 2 * max(x.nbytes, SMALL_BYTES) else x


def _multiply(
    key: str, base: Tensor | None, a: Any, b: Any, native: Callable[[Any, Any], Tensor], value: float = 1
) -> Tensor:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not tensors or not needs_graph(base, a, b) or a.dtype != b.dtype or a.dtype not in FLOAT_BITS:
        return native(a, b)
    slot = find_slot(key, a if a.requires_grad or not b.requires_grad else b)
    if slot.ratio > 0:
        a, b = _apart(a, b) if b.requires_grad else a, _apart(b, a) if a.requires_grad else b
    pruned = [
        x for x, other in ((a, b), (b, a)) if other.requires_grad and _prunable(x, other) and can_prune(x, slot.ratio)
    ]
    if not pruned:
        kept = [x for x, other in ((a, b), (b, a)) if other.requires_grad and _prunable(x, other)]
        return run_exactly(slot, native, kept, a, b)
    return mark(Multiply.apply(slot, slot.ratio, base, a, b, native, value), slot)


def mul(key: str, input: Any, other: Any) -> Tensor:
    return _multiply(key, None, input, other, torch.mul)


def addcmul(key: str, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    def native(a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(input, a, b, value=value)

    return _multiply(key, input, tensor1, tensor2, native, value)


class Divide(torch.autograd.Function):
    """`a / b`: b is kept exactly, a pruned, for the gradient of b."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, a: Tensor, b: Tensor) -> Tensor:
        ctx.shapes = (a.shape, b.shape)
        save(ctx, [Kept(slot, a, ratio)], b)
        return torch.div(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (a,), (b,) = restored(ctx)
        quotient = grads[0] / b
        return (
            None,
            None,
            reduce_to(quotient, ctx.shapes[0]) if ctx.needs_input_grad[2] else None,
            reduce_to(-quotient * (a / b), ctx.shapes[1]) if ctx.needs_input_grad[3] else None,
        )


def div(key: str, input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    tensors = isinstance(input, Tensor) and isinstance(other, Tensor)
    if not tensors or rounding_mode or not needs_graph(input, other) or not other.requires_grad:
        return torch.div(input, other, rounding_mode=rounding_mode)
    slot = find_slot(key, input if input.requires_grad else other)
    if input.dtype != other.dtype or is_parameter(input) or not can_prune(input, slot.ratio):
        return run_exactly(slot, torch.div, [input], input, other)
    return mark(Divide.apply(slot, slot.ratio, input, other), slot)


class EuclideanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
        output = torch.linalg.vector_norm(x, 2, dim, keepdim)
        ctx.dim, ctx.keepdim = dim, keepdim
        save(ctx, [Kept(slot, x, ratio)], output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,), (norm,) = restored(ctx)
        scale = (grads[0] / norm).masked_fill_(norm == 0, 0)
        if not ctx.keepdim and ctx.dim is not None:
            for d in sorted(d % x.dim() for d in ((ctx.dim,) if isinstance(ctx.dim, int) else ctx.dim)):
                scale = scale.unsqueeze(d)
        return None, None, x * scale, None, None


def _norm(key: str, native: Callable[[], Tensor], x: Tensor, order: Any, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    if order not in (None, 2, 2.0, "fro") or dtype is not None or not needs_graph(x):
        return native()
    slot = find_slot(key, x)
    if not can_prune(x, slot.ratio):
        return run_exactly(slot, native, [x])
    return mark(EuclideanNorm.apply(slot, slot.ratio, x, dim, keepdim), slot)


def norm(key: str, input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return _norm(key, lambda: torch.norm(input, p, dim, keepdim, dtype=dtype), input, p, dim, keepdim, dtype)


def vector_norm(
    key: str, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    def native() -> Tensor:
        return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)

    return _norm(key, native, x, ord, dim, keepdim, dtype)


def normalize(
    key: str, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """`F.normalize`, in the steps torch has it in."""
    if out is not None or not needs_graph(input):
        return F.normalize(input, p, dim, eps, out)
    length = norm(key, input, p, dim, True)
    return div(key, input, clamp_min(key, length, eps).expand_as(input))
