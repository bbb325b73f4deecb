"""Smooth functions of one activation: what the gradient reads, the input or the output, is kept pruned.

Reference: the native gradient of the pruned tensor. A row of `FUNCTIONS` has the native function, which of the two its
gradient reads, and that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels.layout import FLOAT_BITS
from surgeon_fx.ops.common import needs_graph, remember_exact, run_exactly
from surgeon_fx.ops.keep import Kept, can_prune, is_prunable, restored, save
from surgeon_fx.ops.slots import Slot, find_slot, mark, note

aten = torch.ops.aten


class Smooth(NamedTuple):
    native: Callable[..., Tensor]
    reads: str  # "input" or "output"
    gradient: Callable[..., Tensor]  # of the output gradient, what it reads, and the options of the native function


def _log_sigmoid_gradient(g: Tensor, x: Tensor) -> Tensor:
    return g * torch.sigmoid(-x)


def _softsign_gradient(g: Tensor, x: Tensor) -> Tensor:
    """g / (1 + |x|)^2, in the steps of the native quotient: they round alike."""
    below = x.abs() + 1
    return g / below - g * (x / below / below) * x.sign()


def _power_gradient(g: Tensor, x: Tensor, exponent: Any) -> Tensor:
    return g * (exponent * x ** (exponent - 1))


FUNCTIONS: dict[str, Smooth] = {
    "gelu": Smooth(F.gelu, "input", lambda g, x, approximate="none": aten.gelu_backward(g, x, approximate=approximate)),
    "silu": Smooth(F.silu, "input", lambda g, x, inplace=False: aten.silu_backward(g, x)),
    "hardswish": Smooth(F.hardswish, "input", lambda g, x, inplace=False: aten.hardswish_backward(g, x)),
    "mish": Smooth(F.mish, "input", lambda g, x, inplace=False: aten.mish_backward(g, x)),
    "softplus": Smooth(
        F.softplus, "input", lambda g, x, beta=1, threshold=20: aten.softplus_backward(g, x, beta, threshold)
    ),
    "elu": Smooth(F.elu, "input", lambda g, x, alpha=1.0, inplace=False: aten.elu_backward(g, alpha, 1, 1, False, x)),
    "celu": Smooth(
        F.celu, "input", lambda g, x, alpha=1.0, inplace=False: aten.elu_backward(g, alpha, 1, 1 / alpha, False, x)
    ),
    "selu": Smooth(
        F.selu,
        "input",
        lambda g, x, inplace=False: aten.elu_backward(g, 1.6732632423543772, 1.0507009873554805, 1, False, x),
    ),
    "logsigmoid": Smooth(F.logsigmoid, "input", _log_sigmoid_gradient),
    "softsign": Smooth(F.softsign, "input", _softsign_gradient),
    "tanhshrink": Smooth(F.tanhshrink, "input", lambda g, x: g * x.tanh().square()),
    "glu": Smooth(F.glu, "input", lambda g, x, dim=-1: aten.glu_backward(g, x, dim)),
    "sigmoid": Smooth(torch.sigmoid, "output", lambda g, y: aten.sigmoid_backward(g, y)),
    "tanh": Smooth(torch.tanh, "output", lambda g, y: aten.tanh_backward(g, y)),
    "exp": Smooth(torch.exp, "output", lambda g, y: g * y),
    "square": Smooth(torch.square, "input", lambda g, x: g * (2 * x)),
    "sin": Smooth(torch.sin, "input", lambda g, x: g * x.cos()),
    "cos": Smooth(torch.cos, "input", lambda g, x: g * -x.sin()),
    "pow": Smooth(torch.pow, "input", _power_gradient),
}


class SmoothFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, row: Smooth, args: tuple[Any, ...], kwargs: Any
    ) -> Tensor:
        ctx.gradient, ctx.args, ctx.kwargs = row.gradient, args, kwargs
        kept = Kept(slot, x, ratio) if row.reads == "input" else None
        output = row.native(x, *args, **kwargs)
        if output is x:
            ctx.mark_dirty(x)
        save(ctx, [kept if kept is not None else Kept(slot, output, ratio)])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (kept,), _ = restored(ctx)
        gradient = ctx.gradient(grads[0], kept.to(grads[0].dtype), *ctx.args, **ctx.kwargs)
        return None, None, gradient, None, None, None


def _smooth(name: str) -> Callable[..., Tensor]:
    row = FUNCTIONS[name]

    def smooth(key: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not needs_graph(input) or input.dtype not in FLOAT_BITS:
            return row.native(input, *args, **kwargs)
        slot = find_slot(key, input)
        if not can_prune(input, slot.ratio):
            output = mark(row.native(input, *args, **kwargs), slot)
            kept = input if row.reads == "input" else output
            if output is not input:  # else autograd keeps a copy that nobody can share
                remember_exact(slot, output.grad_fn, [kept])
            if slot.group.observed:
                note(slot, output.grad_fn, "prune" if is_prunable(kept) else "exact", kept)
            return output
        return mark(SmoothFunction.apply(slot, slot.ratio, input, row, args, kwargs), slot)

    smooth.__name__ = smooth.__qualname__ = name
    return smooth


gelu, silu, hardswish, mish, softplus = map(_smooth, ("gelu", "silu", "hardswish", "mish", "softplus"))
elu, celu, selu, logsigmoid, glu = map(_smooth, ("elu", "celu", "selu", "logsigmoid", "glu"))
softsign, tanhshrink = map(_smooth, ("softsign", "tanhshrink"))
sigmoid, tanh, exp, square, sin, cos = map(_smooth, ("sigmoid", "tanh", "exp", "square", "sin", "cos"))
_pow = _smooth("pow")


def pow(key: str, input: Any, exponent: Any) -> Tensor:
    """Whole powers from 2: the gradient of others is infinite or undefined at a dropped element."""
    whole = isinstance(exponent, (int, float)) and exponent >= 2 and exponent == int(exponent)
    if not whole or not isinstance(input, Tensor):
        return torch.pow(input, exponent)
    return _pow(key, input, exponent)


class PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor) -> Tensor:
        save(ctx, [Kept(slot, x, ratio)], weight)
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,), (weight,) = restored(ctx)
        view = weight.view(1, -1, *[1] * (x.dim() - 2)) if x.dim() > 1 else weight
        dx, dw = aten._prelu_kernel_backward(grads[0], x, view.to(x.dtype))
        return None, None, dx, dw.sum_to_size(view.shape).view(weight.shape), None


def prelu(key: str, input: Tensor, weight: Tensor) -> Tensor:
    if not needs_graph(input, weight):
        return F.prelu(input, weight)
    slot = find_slot(key, input)
    if not can_prune(input, slot.ratio):
        return run_exactly(slot, F.prelu, [input], input, weight)
    return mark(PReLU.apply(slot, slot.ratio, input, weight), slot)
