"""Functions whose gradient passes or does not: ReLU and its kin, clamp. One bit per element, exact at any ratio.

Reference: the native gradient. It reads the sign or the range of a tensor, which is what the bit says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels import mask_by_bits, pack_bits, pack_sign, unpack_value
from surgeon_fx.kernels.layout import FLOAT_BITS, densify, laid_out
from surgeon_fx.ops.common import needs_graph, remember_exact
from surgeon_fx.ops.slots import Slot, find_slot, mark, note

Pass = Callable[[Tensor], Tensor]  # from the input or the output to bits: where the gradient passes


class Rectify(torch.autograd.Function):
    """A function whose gradient is `scale` where its bit is clear and 1 where it is set.

    `bits` is made of the output, which for an in-place function is all there is, or of the input where `of_input`.
    `back` makes the gradient of the output's and of a tensor of ones and zeros.
    """

    @staticmethod
    def forward(ctx: Any, slot: Slot, x: Tensor, function: Pass, bits: Pass, of_input: bool, back: Any) -> Tensor:
        packed = bits(x) if of_input else None
        output = function(x)
        if output is x:
            ctx.mark_dirty(x)
        if packed is None:
            packed = bits(output)
        layout = output if output.is_contiguous() else densify(output.detach())
        ctx.shape, ctx.stride, ctx.dtype, ctx.back = output.shape, layout.stride(), output.dtype, back
        ctx.save_for_backward(packed)
        if slot.group.observed:
            note(slot, ctx, "bits", x if of_input else output, slice(0, 1))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (packed,) = ctx.saved_tensors
        if ctx.back is _masked and not torch.is_grad_enabled():
            grad = mask_by_bits(laid_out(grads[0], ctx.shape, ctx.stride), packed)
        else:  # what autograd can differentiate once more
            one = torch.ones((), dtype=ctx.dtype, device=packed.device)
            grad = ctx.back(grads[0], unpack_value(packed, one, ctx.shape, ctx.stride))
        return None, grad, None, None, None, None


def _masked(grad: Tensor, passes: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, passes, 0)


def _run(key: str, x: Tensor, function: Pass, bits: Pass, of_input: bool, back: Any = _masked) -> Tensor:
    if not needs_graph(x) or x.dtype not in FLOAT_BITS:
        return function(x)
    slot = find_slot(key, x)
    return mark(Rectify.apply(slot, x, function, bits, of_input, back), slot)


def relu(key: str, input: Tensor, inplace: bool = False) -> Tensor:
    return _run(key, input, torch.relu_ if inplace else torch.relu, pack_sign, False)


def relu_(key: str, input: Tensor) -> Tensor:
    return relu(key, input, True)


def leaky_relu(key: str, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    def back(grad: Tensor, passes: Tensor) -> Tensor:
        return torch.ops.aten.leaky_relu_backward(grad, passes, negative_slope, False)

    # The sign of the input: of the output only where the slope is positive. NaN takes the slope.
    return _run(key, input, lambda x: F.leaky_relu(x, negative_slope, inplace), lambda x: pack_bits(x > 0), True, back)


def leaky_relu_(key: str, input: Tensor, negative_slope: float = 0.01) -> Tensor:
    return leaky_relu(key, input, negative_slope, True)


def hardtanh(key: str, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    function = F.hardtanh_ if inplace else F.hardtanh
    return _run(key, input, lambda x: function(x, min_val, max_val), _between(min_val, max_val), True)


def threshold(key: str, input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    def bits(x: Tensor) -> Tensor:
        return pack_bits(~(x <= threshold))

    return _run(key, input, lambda x: F.threshold(x, threshold, value, inplace), bits, True)


def relu6(key: str, input: Tensor, inplace: bool = False) -> Tensor:
    return _run(key, input, lambda x: F.relu6(x, inplace), _between(0.0, 6.0), True)


def hardsigmoid(key: str, input: Tensor, inplace: bool = False) -> Tensor:
    def back(grad: Tensor, passes: Tensor) -> Tensor:
        return torch.ops.aten.hardsigmoid_backward(grad, 4 * (1 - passes))  # 0 is inside the slope, 4 is not

    return _run(key, input, lambda x: F.hardsigmoid(x, inplace), _between(-3.0, 3.0), True, back)


def _between(low: float, high: float, at_low: bool = False, at_high: bool = False, at_nan: bool = True) -> Pass:
    """Bits of where the gradient passes: between two ends, and at them or at NaN where it is said so."""

    def bits(x: Tensor) -> Tensor:
        stops = (x < low if at_low else x <= low) | (x > high if at_high else x >= high)
        return pack_bits(~stops if at_nan else ~(stops | x.isnan()))

    return bits


def clamp(key: str, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if min is None and max is None:
        return torch.clamp(input, min, max)
    if isinstance(min, Tensor) or isinstance(max, Tensor):  # half of the gradient passes at them: no bit
        output = torch.clamp(input, min, max)
        if output.grad_fn is not None:
            remember_exact(find_slot(key, input), output.grad_fn, [input])
        return output
    at_low, at_high, at_nan = CLAMP_PASSES[min is not None, max is not None]
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return _run(key, input, lambda x: torch.clamp(x, min, max), _between(low, high, at_low, at_high, at_nan), True)


clip = clamp


def clamp_min(key: str, input: Tensor, min: Any) -> Tensor:
    return clamp(key, input, min)


def clamp_max(key: str, input: Tensor, max: Any) -> Tensor:
    return clamp(key, input, None, max)


def _clamp_passes(low: float | None, high: float | None) -> tuple[bool, bool, bool]:
    """Whether clamp passes the gradient at its lower end, its upper end and NaN: asked of torch, version by version."""
    with torch.enable_grad(), torch.inference_mode(False):
        asked = torch.tensor([low or 0.0, high or 0.0, math.nan], dtype=torch.float64, requires_grad=True)
        (passed,) = torch.autograd.grad(torch.clamp(asked, low, high).sum(), asked)
    return low is None or bool(passed[0]), high is None or bool(passed[1]), bool(passed[2])


CLAMP_PASSES = {
    (low is not None, high is not None): _clamp_passes(low, high)
    for low, high in ((1.0, 2.0), (1.0, None), (None, 2.0))
}
