"""Convolutions, plain and transposed: the input is kept pruned, for the weight gradient alone.

Reference: the native convolution's gradients, with the input replaced by its pruned self where the weight gradient
reads it. Input and bias gradients do not read it, so they are exact. A frozen weight needs no input at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend
from surgeon_fx.kernels.sparse_grad import conv_weight_grad, weight_grad_pays
from surgeon_fx.ops.common import autocast_dtype, cast, each, needs_graph, run_exactly, stand_in
from surgeon_fx.ops.keep import Kept, can_prune, save, without_surroundings
from surgeon_fx.ops.slots import Slot, find_slot, mark

Sizes = int | Sequence[int]


class Convolution(torch.autograd.Function):
    """`geometry` is stride, padding, dilation, transposed, output padding and groups."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
    ) -> Tensor:
        dtype, given = autocast_dtype(x), x
        x = cast(x, dtype)
        ctx.dtype, ctx.geometry, ctx.has_bias = dtype, geometry, bias is not None
        ctx.layout = x.shape, x.stride(), x.dtype
        save(ctx, [Kept(slot, x, ratio, cast_of=given)] if weight.requires_grad else [], weight)
        return torch.convolution(x, cast(weight, dtype), cast(bias, dtype), *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dw = _sparse_weight_grad(ctx, grads[0], saved, weight) if wants_weight else None
        # Gradients that do not read the input ask for its layout alone.
        x = ctx.kept[0].restore(*saved) if dw is None and saved else stand_in(grads[0], *ctx.layout)
        *_, transposed, _, groups = ctx.geometry
        sizes = [weight.shape[1] * groups if transposed else weight.shape[0]] if ctx.has_bias else None
        if dw is None:
            found = torch.ops.aten.convolution_backward(
                grads[0], x, cast(weight, ctx.dtype), sizes, *ctx.geometry, [wants_x, wants_weight, wants_bias]
            )
            return None, None, *found, None
        dx = None
        if wants_x:
            dx = torch.ops.aten.convolution_backward(
                grads[0], x, cast(weight, ctx.dtype), sizes, *ctx.geometry, [True, False, False]
            )[0]
        db = grads[0].sum((0, *range(2, grads[0].dim()))) if wants_bias else None
        return None, None, dx, dw, db, None


def _sparse_weight_grad(ctx: Any, grad: Tensor, saved: Sequence[Any], weight: Tensor) -> Tensor | None:
    """The weight gradient from what was kept, where that takes less time than restoring it."""
    shape, *_ = ctx.layout
    *_, groups = ctx.geometry
    if not saved or not weight_grad_pays(saved[0].numel(), grad, shape, weight.shape, groups):
        return None
    found = ctx.kept[0].packed(*saved)
    if found is None:
        return None
    stride, padding, dilation, transposed, _, _ = ctx.geometry
    values, bitmask = found
    return conv_weight_grad(
        *(grad, values, bitmask, shape, ctx.kept[0].restored_stride, weight.shape),
        *(stride, padding, dilation, transposed, groups, active_backend(grad.device.type)),
    )


def _convolve(
    key: str,
    native: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **sizes: Any,
) -> Tensor:
    if not needs_graph(input, weight, bias) or input.dtype.is_complex:
        return native(input, weight, bias, **sizes)
    slot = find_slot(key, input)
    input = without_surroundings(input)
    if weight.requires_grad and not can_prune(input, slot.ratio):
        slot.elements += input.numel()
        return run_exactly(slot, native, [input], input, weight, bias, **sizes)
    if input.dim() == dims + 1:  # one sample
        return _convolve(key, native, dims, input.unsqueeze(0), weight, bias, **sizes).squeeze(0)
    slot.elements += input.numel()
    dilation, padding = each(sizes["dilation"], dims), sizes["padding"]
    if padding == "same":
        input, padding = _pad_to_same(input, weight, dilation)
    geometry = (
        each(sizes["stride"], dims),
        each(0 if padding == "valid" else padding, dims),
        dilation,
        "output_padding" in sizes,
        each(sizes.get("output_padding", 0), dims),
        sizes["groups"],
    )
    return mark(Convolution.apply(slot, slot.ratio, input, weight, bias, geometry), slot)


def _pad_to_same(x: Tensor, weight: Tensor, dilation: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Padding that keeps the size; where it is odd, the input is padded by one at the far end first."""
    total = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    if any(size % 2 for size in total):
        x = F.pad(x, [end for size in reversed(total) for end in (0, size % 2)])
    return x, [size // 2 for size in total]


def _plain(dims: int) -> Callable[..., Tensor]:
    native = getattr(F, f"conv{dims}d")

    def conv(
        key: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        sizes = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return _convolve(key, native, dims, input, weight, bias, **sizes)

    conv.__name__ = conv.__qualname__ = native.__name__
    return conv


def _transposed(dims: int) -> Callable[..., Tensor]:
    native = getattr(F, f"conv_transpose{dims}d")

    def conv_transpose(
        key: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Tensor:
        sizes = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return _convolve(key, native, dims, input, weight, bias, output_padding=output_padding, **sizes)

    conv_transpose.__name__ = conv_transpose.__qualname__ = native.__name__
    return conv_transpose


conv1d, conv2d, conv3d = _plain(1), _plain(2), _plain(3)
conv_transpose1d, conv_transpose2d, conv_transpose3d = _transposed(1), _transposed(2), _transposed(3)
