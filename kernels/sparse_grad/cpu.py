"""The C kernel (kernels/native/sparse_grad.c) on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from surgeon_fx.kernels.compress.reference import mask_mismatch
from surgeon_fx.kernels.native import call, threads
from surgeon_fx.kernels.sparse_grad import reference

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MISMATCH, NOT_FINITE = 1, 2
NO_DIMENSION = (1, 1, 1, 1, 0, 1)  # size, output size, taps, stride, padding, dilation


def conv_weight_grad(
    grad: Tensor,
    values: Tensor,
    bitmask: Tensor,
    input_size: Sequence[int],
    input_stride: Sequence[int],
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Tensor:
    x_last = _channels_last(input_size, input_stride)
    g_last = _channels_last(grad.shape, grad.stride())
    if not g_last:
        grad = grad.contiguous()

    def restoring() -> Tensor:
        return reference.conv_weight_grad(
            *(grad, values, bitmask, input_size, input_stride, weight_size),
            *(stride, padding, dilation, transposed, groups),
        )

    if x_last is None or not _is_sparse(grad, bitmask):
        return restoring()
    geometry = list(zip(input_size[2:], grad.shape[2:], weight_size[2:], stride, padding, dilation, strict=True))
    if all((size, taps, step, pad) == (out, 1, 1, 0) for size, out, taps, step, pad, _ in geometry):
        places = math.prod(input_size[2:])  # one tap: places are a single row
        geometry = [(places, places, 1, 1, 0, 1)]
    # Rows first: they are what is cut into chunks.
    geometry = [geometry[0], *[NO_DIMENSION] * (3 - len(geometry)), *geometry[1:]]
    dw = grad.new_empty(weight_size, dtype=torch.float32)
    channels = (input_size[1] // groups, grad.shape[1] // groups)
    layout = (int(transposed), int(x_last), int(bool(g_last)), TYPES[grad.dtype])
    status = _run(grad, values, bitmask, dw, input_size[0], groups, *channels, *sum(geometry, ()), *layout)
    return restoring() if status == NOT_FINITE else dw.to(grad.dtype)


def linear_weight_grad(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int) -> Tensor:
    rows, outputs = grad.shape
    if not _is_sparse(grad, bitmask):
        return reference.linear_weight_grad(grad, values, bitmask, inputs)
    dw = grad.new_empty(outputs, inputs, dtype=torch.float32)
    grad = grad.contiguous()
    geometry = (rows, rows, 1, 1, 0, 1, *NO_DIMENSION, *NO_DIMENSION)
    status = _run(grad, values, bitmask, dw, 1, 1, inputs, outputs, *geometry, 0, 1, 1, TYPES[grad.dtype])
    return reference.linear_weight_grad(grad, values, bitmask, inputs) if status == NOT_FINITE else dw.to(grad.dtype)


def _is_sparse(grad: Tensor, bitmask: Tensor) -> bool:
    """Whether the kernel takes it: where all or nothing was kept, there is no mask."""
    return grad.dtype in TYPES and grad.numel() > 0 and bitmask.numel() > 0


def _channels_last(size: Sequence[int], stride: Sequence[int]) -> bool | None:
    """Whether channels are the last dimension in memory; None where a dense layout is neither that nor contiguous."""
    for last, order in ((False, range(len(size))), (True, (0, *range(2, len(size)), 1))):
        expected = 1
        for i in reversed(list(order)):
            if size[i] != 1 and stride[i] != expected:
                break
            expected *= size[i]
        else:
            return last
    return None


def _run(grad: Tensor, values: Tensor, bitmask: Tensor, dw: Tensor, *sizes: int) -> int:
    kept = values.float()
    given = (c_int64 * len(sizes))(*sizes)
    pointers = (grad.data_ptr(), kept.data_ptr(), kept.numel(), bitmask.data_ptr(), given, dw.data_ptr())
    status = call("sfx_weight_grad", *pointers, threads())
    if status == MISMATCH:
        raise ValueError(mask_mismatch(values.numel()))
    return status
