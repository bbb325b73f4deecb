"""What the kernels compute: the native backward, given x-hat as the input, a mean of 0 and a deviation of 1."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.compress import Compressed, decompress


def batch_norm_grad(grad: Tensor, values: Tensor, bitmask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hat = _restored(grad, values, bitmask)
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    return torch.ops.aten.native_batch_norm_backward(
        grad, hat, scale, None, None, zero, one, True, 0.0, [True, True, True]
    )


def layer_norm_grad(
    grad: Tensor, values: Tensor, bitmask: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = grad.view(rstd.numel(), -1)
    hat = _restored(grad, values, bitmask).view_as(g)
    column = rstd.view(-1, 1)
    weight = g.new_ones(g.shape[1]) if weight is None else weight
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        g, hat, [g.shape[1]], torch.zeros_like(column), torch.ones_like(column), weight, weight, [True, True, True]
    )
    return dx.mul_(column).view_as(grad), dw, db


def _restored(grad: Tensor, values: Tensor, bitmask: Tensor) -> Tensor:
    return decompress(Compressed(values, bitmask, tuple(grad.shape), grad.stride())).to(grad.dtype)
