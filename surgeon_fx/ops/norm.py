"""Normalisations: the normalised input is kept pruned, so that a dropped element means the mean.

Reference, for x-hat = (x - mean) * rstd over the normalised dimensions, g the output gradient and w the weight:
dx = rstd * (g w - mean(g w) - x-hat mean(g w x-hat)), dw = sum(g x-hat), db = sum(g), with x-hat pruned. The native
backward kernels compute just that when they are given x-hat as the input, a mean of 0 and a deviation of 1. RMS norm
has no mean. Batch norm over running statistics needs x-hat for its weight gradient alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels import compress
from surgeon_fx.kernels.batch_norm import batch_norm as fast_batch_norm
from surgeon_fx.kernels.compress.normalised import compress_normalised, compress_normalised_pays
from surgeon_fx.kernels.norm_grad import batch_norm_grad, layer_norm_grad, norm_grad_pays
from surgeon_fx.ops.common import is_parameter, needs_graph, run_exactly
from surgeon_fx.ops.keep import Kept, Prune, can_prune, refuse_double_backward, restored, save, without_surroundings
from surgeon_fx.ops.share import offer_affine
from surgeon_fx.ops.slots import Slot, find_slot, mark

aten = torch.ops.aten


class BatchNorm(torch.autograd.Function):
    """Over the statistics of the batch. `native` runs the operation and returns output, mean and rstd."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor | None, bias: Tensor | None, native: Any
    ) -> Tensor:
        output, mean, rstd = native()
        kept = _keep_normalised(slot, x, mean, rstd, ratio, beside=_beside(rstd, weight))
        save(ctx, [kept], weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        values, bitmask, weight, rstd = ctx.saved_tensors
        scale = rstd if weight is None else weight * rstd.to(weight.dtype)
        if scale.dtype is torch.float32 and _stays_sparse(
            ctx, grads[0], values, bitmask, math.prod(grads[0].shape[2:])
        ):
            found = batch_norm_grad(grads[0], values, bitmask, scale)
            return None, None, *_only(found, _wanted(ctx)), None
        hat = ctx.kept[0].restore(values, bitmask)
        found = aten.native_batch_norm_backward(
            grads[0], hat, scale, None, None, torch.zeros_like(rstd), torch.ones_like(rstd), True, 0.0, _wanted(ctx)
        )
        return None, None, *found, None


class FixedBatchNorm(torch.autograd.Function):
    """Over running statistics: the input gradient needs no input, the weight gradient x-hat."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor, bias: Tensor | None, native: Any, stats: Any
    ) -> Tensor:
        mean, variance, ctx.eps = stats
        kept = []
        if weight is not None and weight.requires_grad:
            kept.append(_keep_normalised(slot, x, mean, (variance + ctx.eps).rsqrt(), ratio))
        save(ctx, kept, weight, variance)
        return native()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        activations, (weight, variance) = restored(ctx)
        zero, wanted = torch.zeros_like(variance), _wanted(ctx)
        if not activations:  # what stands for the input is not read
            found = aten.native_batch_norm_backward(
                grads[0], grads[0], weight, zero, variance, None, None, False, ctx.eps, wanted
            )
        else:
            scale = weight * (variance + ctx.eps).rsqrt().to(weight.dtype)
            found = aten.native_batch_norm_backward(
                grads[0], activations[0], scale, zero, torch.ones_like(variance), None, None, False, 0.0, wanted
            )
        return None, None, *found, None, None


def _beside(rstd: Tensor, weight: Tensor | None) -> int:
    """Bytes that the native operation keeps: mean, deviation, and a weight that was computed."""
    return 2 * rstd.nbytes + (0 if weight is None or is_parameter(weight) else weight.nbytes)


def _stays_sparse(ctx: Any, grad: Tensor, values: Tensor, bitmask: Tensor | None, run: int) -> bool:
    """Whether the gradient comes from what was kept, without restoring it. `run`: elements of a channel or row."""
    kept = ctx.kept[0]
    refuse_double_backward()
    return (
        bitmask is not None
        and grad.is_contiguous()
        and kept.stride == grad.stride()
        and grad.dtype is values.dtype
        and norm_grad_pays(values, bitmask, run)
    )


def _only(found: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [x if want else None for x, want in zip(found, wanted, strict=True)]


def _wanted(ctx: Any) -> list[bool]:
    return list(ctx.needs_input_grad[2:5])


def _keep_normalised(slot: Slot, x: Tensor, mean: Tensor, rstd: Tensor, ratio: float, beside: int = 0) -> Kept:
    """x-hat per channel, pruned; dense for a moment where no kernel makes it from `x`."""
    if not compress_normalised_pays(x, mean, "channel"):
        return Kept(slot, _normalised(x, mean, rstd), ratio, instead_of=x, beside=beside)
    return Kept(slot, x, ratio, instead_of=x, beside=beside, prune=_prune_normalised(mean, rstd, "channel"))


def _prune_normalised(mean: Tensor, rstd: Tensor, by: str) -> Prune:
    return lambda x, ratio: compress_normalised(x, mean, rstd, by, ratio)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """x-hat per channel."""
    if x.dtype == mean.dtype:  # the native kernel does it in one pass
        return torch.batch_norm(x, None, None, mean, rstd**-2, False, 0.0, 0.0, False)
    view = (1, -1, *[1] * (x.dim() - 2))
    return x.sub(mean.view(view)).mul_(rstd.view(view)).to(x.dtype)


def batch_norm(
    key: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    def exactly() -> Tensor:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    if not needs_graph(input, weight, bias):
        return exactly()
    slot = find_slot(key, input)
    slot.elements += input.numel()
    input, ratio = without_surroundings(input), slot.ratio
    trains = weight is not None and weight.requires_grad
    if not training and running_mean is not None and running_var is not None:
        if trains and not can_prune(input, ratio):
            return run_exactly(slot, exactly, [input])
        stats = (running_mean, running_var, eps)
        output = mark(FixedBatchNorm.apply(slot, ratio, input, weight, bias, exactly, stats), slot)
        return offer_affine(slot, output, weight, bias, 1)
    if not can_prune(input, ratio):
        return run_exactly(slot, exactly, [input])
    if training:
        F._verify_batch_size(input.size())  # type: ignore[attr-defined]
    if eps <= 0:
        return exactly()  # an error, or not, by the version of torch

    def native() -> tuple[Tensor, ...]:
        return fast_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)

    output = mark(BatchNorm.apply(slot, ratio, input, weight, bias, native), slot)
    return offer_affine(slot, output, weight, bias, 1)


def instance_norm(
    key: str,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A batch norm of one sample whose channels are those of all samples, as torch has it too."""
    if not needs_graph(input, weight, bias):
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        F._verify_spatial_size(input.size())  # type: ignore[attr-defined]
    batch, channels, *rest = input.shape
    repeated: list[Any] = [None if x is None else x.repeat(batch) for x in (running_mean, running_var, weight, bias)]
    flat = input.contiguous().view(1, batch * channels, *rest)
    mean, variance, scale, shift = repeated
    output = batch_norm(key, flat, mean, variance, scale, shift, use_input_stats, momentum, eps)
    if use_input_stats:
        for running, moved in zip((running_mean, running_var), repeated, strict=False):
            if running is not None and moved is not None:
                running.copy_(moved.view(batch, channels).mean(0))
    return output.view(input.shape)


class RowNorm(torch.autograd.Function):
    """Layer and group norm. `back` is the native backward for mean 0 and deviation 1; `rows` scales what it gives.

    Where each row has a deviation of its own (`by_row`, layer norm), a kernel may do both from what was kept.
    """

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor | None, bias: Tensor | None, run: Any
    ) -> Tensor:
        native, ctx.back, ctx.rows, ctx.by_row = run
        output, mean, rstd = native(x, weight, bias)
        hat: Tensor = output
        prune: Prune = compress
        if weight is not None or bias is not None:
            if compress_normalised_pays(x, mean, "row"):
                hat, prune = x, _prune_normalised(mean, rstd, "row")
            else:
                hat = native(x, None, None)[0]
        kept = Kept(slot, hat, ratio, instead_of=x, beside=_beside(rstd, weight), prune=prune)
        save(ctx, [kept], weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        values, bitmask, weight, rstd = ctx.saved_tensors
        wanted, row = _wanted(ctx), grads[0].numel() // rstd.numel()
        if ctx.by_row and _stays_sparse(ctx, grads[0], values, bitmask, row):
            dx, dw, db = layer_norm_grad(grads[0], values, bitmask, weight, rstd)
            if weight is not None:
                dw, db = dw.view_as(weight), db.view_as(weight)
            return None, None, *_only((dx, dw, db), wanted), None
        hat = ctx.kept[0].restore(values, bitmask)
        dx, dw, db = ctx.back(grads[0], hat, torch.zeros_like(rstd), torch.ones_like(rstd), weight, wanted)
        if wanted[0]:
            dx = ctx.rows(dx, rstd)
        return None, None, dx, dw, db, None


def layer_norm(
    key: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    def exactly() -> Tensor:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    if not needs_graph(input, weight, bias):
        return exactly()
    slot = find_slot(key, input)
    slot.elements += input.numel()
    input = without_surroundings(input)
    if not can_prune(input, slot.ratio):
        return run_exactly(slot, exactly, [input])
    shape = list(normalized_shape)
    if torch.is_autocast_enabled("cuda") and input.is_cuda:
        input = input.float()

    def native(x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
        return torch.native_layer_norm(x, shape, w, b, eps)

    def back(g: Tensor, hat: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, wanted: list[bool]) -> Any:
        like_bias = None if bias is None else bias.detach()
        return aten.native_layer_norm_backward(g, hat, shape, mean, rstd, w, like_bias, wanted)

    def rows(dx: Tensor, rstd: Tensor) -> Tensor:
        return dx.mul_(rstd)

    run = (native, back, rows, True)
    output = mark(RowNorm.apply(slot, slot.ratio, input, weight, bias, run), slot)
    return offer_affine(slot, output, weight, bias, -1)


def group_norm(
    key: str,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    def exactly() -> Tensor:
        return F.group_norm(input, num_groups, weight, bias, eps)

    if not needs_graph(input, weight, bias):
        return exactly()
    slot = find_slot(key, input)
    slot.elements += input.numel()
    input = without_surroundings(input)
    if not can_prune(input, slot.ratio) or input.shape[1] % num_groups:
        return run_exactly(slot, exactly, [input])
    batch, channels = input.shape[:2]
    sizes = (batch, channels, math.prod(input.shape[2:]), num_groups)
    if torch.is_autocast_enabled("cuda") and input.is_cuda:
        input = input.float()
    channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def native(x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
        return torch.native_group_norm(x.contiguous(memory_format=layout), w, b, *sizes, eps)

    def back(g: Tensor, hat: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, wanted: list[bool]) -> Any:
        g = g.contiguous(memory_format=layout)
        return aten.native_group_norm_backward(g, hat, mean, rstd, w, *sizes, wanted)

    def rows(dx: Tensor, rstd: Tensor) -> Tensor:
        scale = rstd.repeat_interleave(channels // num_groups, 1)
        return dx.mul_(scale.view(batch, channels, *[1] * (dx.dim() - 2)))

    run = (native, back, rows, False)
    output = mark(RowNorm.apply(slot, slot.ratio, input, weight, bias, run), slot)
    return offer_affine(slot, output, weight, bias, 1)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor | None, dims: list[int], eps: float, exactly: Any
    ) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        rstd = wide.square().mean(dims, keepdim=True).add_(eps).rsqrt_()
        ctx.dims, ctx.weight_shape = dims, None if weight is None else weight.shape
        hat = (wide * rstd).to(x.dtype)
        written_out = 0 if weight is None else hat.nbytes  # torch keeps x-hat too where it has no kernel
        save(ctx, [Kept(slot, hat, ratio, instead_of=x, beside=written_out + rstd.nbytes)], weight, rstd)
        return exactly()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (hat,), (weight, rstd) = restored(ctx)
        g = grads[0]
        scaled = g if weight is None else g * weight
        dx = (scaled - hat * (scaled * hat).mean(ctx.dims, keepdim=True)) * rstd
        dw = (g * hat).sum_to_size(ctx.weight_shape) if ctx.needs_input_grad[3] else None
        return None, None, dx, dw, None, None, None


def rms_norm(
    key: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    def exactly() -> Tensor:
        return F.rms_norm(input, list(normalized_shape), weight, eps)

    if not needs_graph(input, weight):
        return exactly()
    slot = find_slot(key, input)
    slot.elements += input.numel()
    input = without_surroundings(input)
    if not can_prune(input, slot.ratio):
        return run_exactly(slot, exactly, [input])
    dims = list(range(-len(normalized_shape), 0))
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    epsilon = torch.finfo(wide).eps if eps is None else eps
    output = mark(RMSNorm.apply(slot, slot.ratio, input, weight, dims, epsilon, exactly), slot)
    return offer_affine(slot, output, weight, None, -1)
