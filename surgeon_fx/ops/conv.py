"""Convolutions, plain and transposed: the input is kept pruned, for the weight gradient alone.

Reference: the native convolution's gradients, with the input replaced by its pruned self where the weight gradient
reads it. Input and bias gradients do not read it, so they are exact. A frozen weight needs no input at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend
from surgeon_fx.kernels.layout import is_row_major
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
        if dw is None:
            # Gradients that do not read the input ask for its layout alone.
            x = ctx.kept[0].restore(*saved) if saved else stand_in(grads[0], *ctx.layout)
            wanted = [wants_x, wants_weight, wants_bias]
            return None, None, *_native_gradients(ctx, grads[0], x, weight, wanted), None
        dx = _input_grad(ctx, grads[0], weight) if wants_x else None
        db = grads[0].sum((0, *range(2, grads[0].dim()))) if wants_bias else None
        return None, None, dx, dw, db, None


def _native_gradients(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Any, ...]:
    *_, transposed, _, groups = ctx.geometry
    sizes = [weight.shape[1] * groups if transposed else weight.shape[0]] if ctx.has_bias else None
    return torch.ops.aten.convolution_backward(grad, x, cast(weight, ctx.dtype), sizes, *ctx.geometry, wanted)


def _input_grad(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    if _is_product(ctx, grad, weight.shape):
        return _patch_input_grad(grad, cast(weight, ctx.dtype), *ctx.layout[:2])
    return _native_gradients(ctx, grad, stand_in(grad, *ctx.layout), weight, [True, False, False])[0]


MOST_PATCHES = 4  # for each output: with more, the native gradient takes no longer


def _is_product(ctx: Any, grad: Tensor, weight_size: Sequence[int]) -> bool:
    """Whether kernels do not overlap and cover the input, so that its gradient is one matrix product, and a fast one.

    For few patches a CPU's native gradient takes longest to bring the weight into another order.
    """
    (_, _, *sizes), kernel, places = ctx.layout[0], list(weight_size[2:]), grad.shape[2:]
    stride, padding, dilation, transposed, _, groups = ctx.geometry
    return (
        grad.is_cpu
        and not transposed
        and groups == 1
        and math.prod(kernel) > 1
        and list(stride) == kernel
        and not any(padding)
        and all(step == 1 for step in dilation)
        and all(size == count * side for size, count, side in zip(sizes, places, kernel, strict=True))
        and grad.numel() <= MOST_PATCHES * weight_size[0] ** 2
    )


def _patch_input_grad(grad: Tensor, weight: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The gradient of a patch is a row of the output gradient times the weight."""
    batch, channels, *sizes = shape
    dims = len(sizes)
    within = [dim for i in range(dims) for dim in (1 + i, 2 + dims + i)]  # a place, and an element of the patch there
    rows = grad.movedim(1, -1).reshape(-1, weight.shape[0])
    patches = rows.mm(weight.flatten(1)).view(batch, *grad.shape[2:], channels, *weight.shape[2:])
    if is_row_major(shape, stride):
        return patches.permute(0, 1 + dims, *within).reshape(shape)
    return patches.permute(0, *within, 1 + dims).reshape(batch, *sizes, channels).movedim(-1, 1)


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
