"""The operations as `torch.library` ops, for compilers that differentiate a graph themselves (AOTAutograd, Inductor).

`pack` makes what is kept of an activation, and the others save it. How much is kept follows the ratio table when `pack`
runs, so sizes are unknown to the compiler (unbacked) and changing a ratio compiles nothing again. At ratio 0 the
activation is copied whole: gradients are then equal to rounding, as compilers have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels import compress, decompress, pack_sign, unpack_value
from surgeon_fx.kernels.compress import Compressed
from surgeon_fx.kernels.compress.normalised import compress_normalised, compress_normalised_pays
from surgeon_fx.kernels.layout import densify, flatten, is_row_major, unflatten
from surgeon_fx.kernels.sparse_grad import conv_weight_grad, linear_weight_grad
from surgeon_fx.ops.keep import can_prune
from surgeon_fx.ops.pool import Window
from surgeon_fx.ops.slots import ratio_behind

aten = torch.ops.aten


def _pack(x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """Values and bitmask at the layer's ratio; all values and no mask where nothing is dropped."""
    x, ratio = densify(x), ratio_behind(layer)
    if can_prune(x, ratio):
        found = compress(x, ratio)
        return found.values, found.bitmask
    return flatten(x).clone(), x.new_empty(0, dtype=torch.uint8)


def _pack_normalised(
    x: Tensor, mean: Tensor, rstd: Tensor, by: str, layer: str, dense: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """x-hat; `dense` computes it where no kernel prunes it straight from `x`."""
    ratio = ratio_behind(layer)
    if can_prune(x, ratio) and compress_normalised_pays(x, mean, by):
        found = compress_normalised(x, mean, rstd, by, ratio)
        return found.values, found.bitmask
    return _pack(dense(), layer)


def _fake_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    return x.new_empty(context.new_dynamic_size()), x.new_empty(context.new_dynamic_size(), dtype=torch.uint8)


@torch.library.custom_op("surgeon_fx::pack", mutates_args=())
def pack(x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    return _pack(x, layer)


@pack.register_fake
def _(x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    return _fake_pack(x)


@torch.library.custom_op("surgeon_fx::restore", mutates_args=())
def restore(values: Tensor, bitmask: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The dense tensor behind what `_pack` returned."""
    if not bitmask.numel():
        dense = values.clone() if values.numel() else values.new_zeros(torch.Size(size).numel())
        return unflatten(dense, size, stride)
    return decompress(Compressed(values, bitmask, tuple(size), tuple(stride)))


@restore.register_fake
def _(values: Tensor, bitmask: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return values.new_empty_strided(size, stride)


def _stride(x: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(x, device="meta").stride())


@torch.library.custom_op("surgeon_fx::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, bitmask: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, bitmask: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *kept = inputs
    _save(ctx, x, kept, weight)
    ctx.has_bias = bias is not None


def _save(ctx: Any, x: Tensor, kept: Sequence[Tensor], *others: Tensor | None) -> None:
    ctx.save_for_backward(*kept, *others)
    ctx.size, ctx.stride = x.shape, _stride(x)


def _linear_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    values, bitmask, weight = ctx.saved_tensors
    rows = g.reshape(-1, weight.shape[0])
    return (
        rows.mm(weight).view(ctx.size) if ctx.needs_input_grad[0] else None,
        _linear_weight_grad(ctx, rows, values, bitmask) if ctx.needs_input_grad[1] else None,
        rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
        None,
        None,
    )


def _linear_weight_grad(ctx: Any, rows: Tensor, values: Tensor, bitmask: Tensor) -> Tensor:
    inputs = ctx.size[-1]
    if is_row_major(ctx.size, ctx.stride):
        return linear_weight_grad(rows, values, bitmask, inputs)
    return rows.t().mm(restore(values, bitmask, ctx.size, ctx.stride).reshape(-1, inputs))


linear.register_autograd(_linear_back, setup_context=_linear_setup)


@torch.library.custom_op("surgeon_fx::conv2d", mutates_args=())
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    values: Tensor,
    bitmask: Tensor,
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


@conv2d.register_fake
def _(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, *kept: Any) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _conv_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *ctx.geometry, values, bitmask = inputs
    _save(ctx, x, (values, bitmask), weight)
    ctx.has_bias = bias is not None


def _conv_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    values, bitmask, weight = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dx = dw = None
    if wants_x:  # asks for the input's shape alone
        shape_only = g.new_empty(()).expand(ctx.size)
        geometry = (stride, padding, dilation, False, [0, 0], groups)
        dx = aten.convolution_backward(g, shape_only, weight, None, *geometry, [True, False, False])[0]
    if wants_weight:
        sizes = (ctx.size, ctx.stride, weight.shape)
        dw = conv_weight_grad(g, values, bitmask, *sizes, stride, padding, dilation, False, groups)
    db = g.sum((0, 2, 3)) if ctx.has_bias and wants_bias else None
    return dx, dw, db, None, None, None, None, None, None


conv2d.register_autograd(_conv_back, setup_context=_conv_setup)


@torch.library.custom_op("surgeon_fx::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Over the statistics of the batch. Returns output, values, bitmask, mean and rstd."""
    output, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)

    def dense() -> Tensor:
        return torch.batch_norm(x, None, None, mean, rstd**-2, False, 0.0, 0.0, False)

    return output, *_pack_normalised(x, mean, rstd, "channel", layer, dense), mean, rstd


@batch_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: str) -> Any:
    output, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
    return output, *_fake_pack(x), mean, rstd


def _batch_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *_ = inputs
    _save(ctx, x, output[1:3], weight, output[4])
    ctx.mark_non_differentiable(*output[1:])


def _batch_norm_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    values, bitmask, weight, rstd = ctx.saved_tensors
    hat = restore(values, bitmask, ctx.size, ctx.stride)
    scale = rstd if weight is None else weight * rstd
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    wanted = list(ctx.needs_input_grad[:3])
    return *aten.native_batch_norm_backward(g, hat, scale, None, None, zero, one, True, 0.0, wanted), None, None


batch_norm.register_autograd(_batch_norm_back, setup_context=_batch_norm_setup)


@torch.library.custom_op("surgeon_fx::layer_norm", mutates_args=())
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, layer: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)

    def dense() -> Tensor:
        return torch.native_layer_norm(x, shape, None, None, eps)[0]

    return output, *_pack_normalised(x, mean, rstd, "row", layer, dense), rstd


@layer_norm.register_fake
def _(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, layer: str) -> Any:
    output, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    return output, *_fake_pack(output), rstd


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.shape, weight, bias, *_ = inputs
    _save(ctx, output[0], output[1:3], weight, bias, output[3])
    ctx.mark_non_differentiable(*output[1:])


def _layer_norm_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    values, bitmask, weight, bias, rstd = ctx.saved_tensors
    hat = restore(values, bitmask, ctx.size, ctx.stride)
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
    dx, dw, db = aten.native_layer_norm_backward(g, hat, ctx.shape, zero, one, weight, bias, wanted)
    return dx * rstd if wanted[0] else None, None, dw, db, None, None


layer_norm.register_autograd(_layer_norm_back, setup_context=_layer_norm_setup)


@torch.library.custom_op("surgeon_fx::gelu", mutates_args=())
def gelu(x: Tensor, approximate: str, values: Tensor, bitmask: Tensor) -> Tensor:
    return F.gelu(x, approximate=approximate)


@gelu.register_fake
def _(x: Tensor, approximate: str, values: Tensor, bitmask: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gelu_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.approximate, *kept = inputs
    _save(ctx, x, kept)


def _gelu_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    x = restore(*ctx.saved_tensors, ctx.size, ctx.stride)
    return aten.gelu_backward(g, x, approximate=ctx.approximate), None, None, None


gelu.register_autograd(_gelu_back, setup_context=_gelu_setup)


@torch.library.custom_op("surgeon_fx::relu", mutates_args=())
def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    output = torch.relu(x)
    return output, pack_sign(output)


@relu.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


@torch.library.custom_op("surgeon_fx::relu_backward", mutates_args=())
def relu_backward(g: Tensor, bits: Tensor, stride: Sequence[int]) -> Tensor:
    passes = unpack_value(bits, torch.ones((), dtype=g.dtype, device=g.device), g.shape, stride)
    return aten.threshold_backward(g, passes, 0)


@relu_backward.register_fake
def _(g: Tensor, bits: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_like(g)


def _relu_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.stride = _stride(output[0])


relu.register_autograd(lambda ctx, g, _: relu_backward(g, ctx.saved_tensors[0], ctx.stride), setup_context=_relu_setup)


@torch.library.custom_op("surgeon_fx::max_pool2d", mutates_args=())
def max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and for each element of it the place of the maximum in its window, as `Window` packs them."""
    output, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return output, Window(x.shape[-2:], kernel, stride, padding, dilation).narrow(indices)


@max_pool2d.register_fake
def _(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    output, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    size = Window(x.shape[-2:], kernel, stride, padding, dilation).bytes(indices.numel())
    return output, indices.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("surgeon_fx::max_pool2d_backward", mutates_args=())
def max_pool2d_backward(
    g: Tensor,
    narrow: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    window: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    sizes = [window[i : i + 2] for i in range(0, 8, 2)]
    x = g.new_empty_strided(size, stride)
    indices, _ = Window(size[-2:], *sizes).widen(narrow, g.shape)
    return aten.max_pool2d_with_indices_backward(g, x, *sizes, ceil_mode, indices)


@max_pool2d_backward.register_fake
def _(g: Tensor, narrow: Tensor, size: Any, stride: Any, window: Any, ceil_mode: bool) -> Tensor:
    return g.new_empty_strided(size, stride)


def _max_pool_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, *sizes, ctx.ceil_mode = inputs
    ctx.size, ctx.stride, ctx.window = x.shape, _stride(x), [n for pair in sizes for n in pair]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _max_pool_back(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    dx = max_pool2d_backward(g, ctx.saved_tensors[0], ctx.size, ctx.stride, ctx.window, ctx.ceil_mode)
    return dx, None, None, None, None, None


max_pool2d.register_autograd(_max_pool_back, setup_context=_max_pool_setup)
