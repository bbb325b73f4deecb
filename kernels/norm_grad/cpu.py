"""The C kernels (kernels/native) on CPU tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surgeon_fx.kernels.compress.reference import mask_mismatch
from surgeon_fx.kernels.native import call, threads


def batch_norm_grad(grad: Tensor, values: Tensor, bitmask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, *plane = grad.shape
    dx, dw, db = torch.empty_like(grad), torch.empty_like(scale), torch.empty_like(scale)
    sizes = (batch, channels, math.prod(plane))
    _run("sfx_batch_norm_grad", grad, values, bitmask, *sizes, scale, dx, dw, db)
    return dx, dw, db


def layer_norm_grad(
    grad: Tensor, values: Tensor, bitmask: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = rstd.numel()
    row = grad.numel() // rows
    dx, dw, db = torch.empty_like(grad), grad.new_empty(row), grad.new_empty(row)
    _run("sfx_layer_norm_grad", grad, values, bitmask, rows, row, weight, rstd, dx, dw, db)
    return dx, dw, db


def _run(name: str, grad: Tensor, values: Tensor, bitmask: Tensor, *rest: Tensor | int | None) -> None:
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in rest]
    if call(name, grad.data_ptr(), values.data_ptr(), values.numel(), bitmask.data_ptr(), *given, threads()):
        raise ValueError(mask_mismatch(values.numel()))
