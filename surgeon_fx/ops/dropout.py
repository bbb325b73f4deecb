"""Dropout: its mask is one bit per element, exact at any ratio.

Reference: torch's own dropout, drawn in the same order from the same generator. Channel dropout has a small mask and is
left to the native function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels import pack_bits, unpack_value
from surgeon_fx.kernels.layout import FLOAT_BITS, densify
from surgeon_fx.ops.common import needs_graph
from surgeon_fx.ops.keep import SMALL_BYTES
from surgeon_fx.ops.slots import Slot, find_slot, mark, note


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, x: Tensor, p: float, inplace: bool) -> Tensor:
        if x.is_cuda and not inplace:  # a fused kernel, with a boolean mask
            output, mask = torch.native_dropout(x, p, True)
        else:
            noise = torch.empty_like(x).bernoulli_(1 - p)
            mask = noise != 0
            noise.div_(1 - p)
            output = x.mul_(noise) if inplace else x * noise
        if inplace:
            ctx.mark_dirty(x)
        mask = densify(mask)
        bits = pack_bits(mask)
        ctx.shape, ctx.stride, ctx.p, ctx.dtype = mask.shape, mask.stride(), p, x.dtype
        ctx.save_for_backward(bits)
        if slot.group.observed:
            note(slot, ctx, "mask", bits, slice(0, 1), x.nbytes)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (bits,) = ctx.saved_tensors
        scale = torch.ones((), dtype=ctx.dtype, device=bits.device).div_(1 - ctx.p)
        return None, grads[0] * unpack_value(bits, scale, ctx.shape, ctx.stride), None, None


def dropout(
    key: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> Tensor:
    """`train` is what `torch.dropout` calls `training`."""
    training = training if train is None else train
    drops = training and 0 < p < 1 and input.dtype in FLOAT_BITS and input.nbytes > SMALL_BYTES
    if not needs_graph(input) or not drops:
        return F.dropout(input, p, training, inplace)
    slot = find_slot(key, input)
    return mark(Dropout.apply(slot, input, p, inplace), slot)
