"""The backward of batch and layer norm, straight from the pruned normalised input: the dense one is never rebuilt.

For x-hat = (x - mean) * rstd, zero where it was dropped, g the output gradient and w the weight:

    batch norm   dx = scale * (g - mean(g) - x-hat mean(g x-hat)) by channel, with scale = w * rstd
    layer norm   dx = rstd * (g w - mean(g w) - x-hat mean(g w x-hat)) by row
    both         dw = sum(g x-hat), db = sum(g)

The C kernels do it for float32 in contiguous memory, and any number of threads gives the same bits. `reference.py` has
what they compute in torch's own operations, which is also what an op runs where there is no C library.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend, define_op
from surgeon_fx.kernels.compress import check_parts
from surgeon_fx.kernels.norm_grad import reference

SHORTEST_RUN = 64  # elements of a channel in one sample, or of a row: shorter runs are dearer than restoring


def norm_grad_pays(values: Tensor, bitmask: Tensor, run: int) -> bool:
    """Whether the kernels take a pruned tensor whose channels or rows are runs of so many elements."""
    return (
        values.dtype is torch.float32
        and bitmask.numel() > 0
        and run >= SHORTEST_RUN
        and active_backend(values.device.type) == "cpu"
    )


def batch_norm_grad(grad: Tensor, values: Tensor, bitmask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, for a gradient [batch, channels, ...] and a scale by channel."""
    return _batch_norm_op(grad, values, bitmask, scale)


def layer_norm_grad(
    grad: Tensor, values: Tensor, bitmask: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, for a gradient whose last dimensions are normalised and one deviation for each row of them.

    dw and db are vectors of a row's elements.
    """
    return _layer_norm_op(grad, values, bitmask, weight, rstd)


def _implementation(bitmask: Tensor, *floats: Tensor | None) -> ModuleType:
    """The C kernels read every argument as float32 and always read a mask; the reference takes the rest."""
    for x in floats:
        if x is not None and (x.dtype is not torch.float32 or active_backend(x.device.type) != "cpu"):
            return reference
    if not bitmask.numel():  # all or nothing was kept
        return reference
    from surgeon_fx.kernels.norm_grad import cpu

    return cpu


def _run_batch_norm(grad: Tensor, values: Tensor, bitmask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_parts(values, bitmask, grad.numel())
    if grad.dim() < 2 or scale.shape != (grad.shape[1],):
        raise ValueError(
            f"scale must have one element for each channel of {tuple(grad.shape)}, got {tuple(scale.shape)}"
        )
    if not grad.numel():  # torch's own backward divides by zero
        return torch.empty_like(grad), torch.zeros_like(scale), torch.zeros_like(scale)
    kernels = _implementation(bitmask, grad, values, scale)
    return kernels.batch_norm_grad(grad.contiguous(), values, bitmask, scale.contiguous())


def _run_layer_norm(
    grad: Tensor, values: Tensor, bitmask: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    check_parts(values, bitmask, grad.numel())
    rows = rstd.numel()
    if not rows or grad.numel() % rows or (weight is not None and weight.numel() != grad.numel() // rows):
        raise ValueError(f"a gradient {tuple(grad.shape)} does not have {rows} rows of the weight's size")
    flat = None if weight is None else weight.detach().reshape(-1)
    kernels = _implementation(bitmask, grad, values, flat, rstd)
    return kernels.layer_norm_grad(grad.contiguous(), values, bitmask, flat, rstd.contiguous())


def _fake_batch_norm(grad: Tensor, values: Tensor, bitmask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(grad, memory_format=torch.contiguous_format),
        scale.new_empty(scale.shape),
        scale.new_empty(scale.shape),
    )


def _fake_layer_norm(
    grad: Tensor, values: Tensor, bitmask: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    row = grad.numel() // rstd.numel()
    dx = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return dx, grad.new_empty(row), grad.new_empty(row)


_batch_norm_op = define_op(
    "batch_norm_grad(Tensor grad, Tensor values, Tensor bitmask, Tensor scale) -> (Tensor dx, Tensor dw, Tensor db)",
    _run_batch_norm,
    _fake_batch_norm,
)
_layer_norm_op = define_op(
    "layer_norm_grad(Tensor grad, Tensor values, Tensor bitmask, Tensor? weight, Tensor rstd)"
    " -> (Tensor dx, Tensor dw, Tensor db)",
    _run_layer_norm,
    _fake_layer_norm,
)
