"""The weight gradient of convolutions and linear layers, straight from the pruned input: it is never restored.

    dw[k, c, tap] = sum of x[n, c, p] g[n, k, q] over samples n and places p, q the output place that p meets under tap

Only kept elements of x are multiplied, so at a ratio of 0.9 a tenth of the work is left. The C kernel
(`native/sparse_grad.c`) reads float32, bfloat16 and float16 and sums in float32; any number of threads gives the same
bits. `reference.py` has the meaning: restore, then the native gradient. `triton.py` restores tiles on chip, multiplies
their zeros too, and says what that means for a gradient that is not finite.

What is not finite: an infinite gradient meets the kept values and no dropped one, whereas dense arithmetic would make
NaN of infinity times the zero in its place. Where a kept value is itself not finite, the input is restored and the
native gradient is what it is in dense arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend, check_backend, define_op, implementation
from surgeon_fx.kernels.compress import check_float, check_parts
from surgeon_fx.kernels.layout import check_layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_grad_pays(
    kept: int, grad: Tensor, input_size: Sequence[int], weight_size: Sequence[int], groups: int
) -> bool:
    """Whether the gradient from kept values takes less time than restoring the input and the native gradient.

    The one place of the rule; `bench/sparse_grad.py` measures it. For a linear layer sizes are those of a convolution
    with one tap over its rows.
    """
    backend = active_backend(grad.device.type)
    if grad.dtype not in DTYPES or backend not in ("cpu", "triton"):
        return False
    inputs, outputs, taps = input_size[1] // groups, grad.shape[1] // groups, math.prod(weight_size[2:])
    places = grad.shape[0] * math.prod(grad.shape[2:])
    if outputs < LEAST_OUTPUTS or inputs * taps < LEAST_WEIGHTS or places * taps < LEAST_PRODUCTS:
        return False
    density = kept / max(1, math.prod(input_size))
    if backend == "triton":
        return density <= GPU_DENSITY and _tiles_pay(grad, outputs, taps)
    met = taps * places * groups * inputs / max(1, math.prod(input_size))  # taps that an element meets, on average
    if met >= MANY_TAPS and inputs >= MANY_INPUTS:
        return density <= MANY_TAPS_DENSITY
    if grad.stride(1) == 1:  # rows, as of a linear layer
        return density <= min(DENSITY, (outputs - FEW_OUTPUTS) / ROW_OUTPUTS)
    return density <= (PLANES_DENSITY if inputs >= MANY_INPUTS else min(DENSITY, outputs / PLANE_OUTPUTS))


def linear_weight_grad_pays(kept: int, grad: Tensor, inputs: int) -> bool:
    """The same for a linear layer's gradient [rows, outputs] over rows of `inputs` elements."""
    rows, outputs = grad.shape
    return weight_grad_pays(kept, grad.t().unsqueeze(0), (1, inputs, rows), (outputs, inputs, 1), 1)


LEAST_OUTPUTS = 16  # of a group: fewer do not fill a register
LEAST_WEIGHTS = 16  # inputs times taps of an output: fewer do not pay for turning the gradient around
LEAST_PRODUCTS = 128  # output places of all samples, times taps: fewer do not pay for the start
MANY_TAPS = 6  # 3x3 at a stride of 1: the tile stays in the first level cache
MANY_INPUTS = 16  # and enough of them to pay for making the tile
MANY_TAPS_DENSITY, PLANES_DENSITY, DENSITY = 0.52, 0.31, 0.25
PLANE_OUTPUTS = 128  # where inputs are few, a quarter of these pay for the tile at DENSITY, fewer below
FEW_OUTPUTS, ROW_OUTPUTS = 64, 512  # where channels lie last lists are dear, and outputs beyond the few pay for them
GPU_DENSITY = 0.125
GPU_TILE = 128  # outputs that share what a program restores
GPU_MOST_RESTORES = 4  # of each element: one per tap and tile of outputs


def _tiles_pay(grad: Tensor, outputs: int, taps: int) -> bool:
    """Not timed, as there was no GPU: only where restoring on chip is little work beside writing the dense input.

    The matrix unit multiplies zeros too. Native float32 may be TF32, which the kernel is not, and Triton has no matrix
    instructions for NVIDIA's GPUs before compute capability 8.0: neither comes here.
    """
    if grad.dtype is torch.float32 or taps * math.ceil(outputs / GPU_TILE) > GPU_MOST_RESTORES:
        return False
    if grad.device.type != "cuda":
        return True
    return torch.cuda.is_available() and torch.cuda.get_device_capability(grad.device)[0] >= 8


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
    transposed: bool = False,
    groups: int = 1,
    backend: str = "auto",
) -> Tensor:
    """The weight gradient of a convolution whose input, of this size and stride, was compressed to values and mask.

    "auto" restores the input where that takes less time.
    """
    return _conv_op(
        *(grad, values, bitmask, input_size, input_stride, weight_size),
        *(stride, padding, dilation, transposed, groups, check_backend(backend)),
    )


def linear_weight_grad(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int, backend: str = "auto") -> Tensor:
    """grad^T x, for a gradient [rows, outputs] and a compressed x of as many rows of `inputs` elements.

    "auto" restores x where that takes less time.
    """
    return _linear_op(grad, values, bitmask, inputs, check_backend(backend))


def _run_conv(
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
    backend: str = "auto",
) -> Tensor:
    check_layout(input_size, input_stride)
    check_parts(values, bitmask, math.prod(input_size))
    _check_alike(grad, values)
    _check_conv(check_float(grad, "grad"), input_size, weight_size, stride, padding, dilation, transposed, groups)
    pays = backend != "auto" or weight_grad_pays(values.numel(), grad, input_size, weight_size, groups)
    return implementation("sparse_grad", backend if pays else "reference", grad.device.type).conv_weight_grad(
        *(grad.detach(), values.detach(), bitmask, input_size, input_stride, weight_size),
        *(stride, padding, dilation, transposed, groups),
    )


def _check_alike(grad: Tensor, values: Tensor) -> None:
    if grad.dtype is not values.dtype or grad.device != values.device:
        raise ValueError(
            f"grad and values must have one dtype and device, got {grad.dtype} on {grad.device} "
            f"and {values.dtype} on {values.device}"
        )


def _check_conv(
    grad: Tensor,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> None:
    dims = len(input_size) - 2
    if dims not in (1, 2, 3) or grad.dim() != dims + 2 or len(weight_size) != dims + 2:
        raise ValueError("grad, input and weight must have a batch, channels and the same 1 to 3 dimensions")
    if any(len(x) != dims for x in (stride, padding, dilation)):
        raise ValueError(f"stride, padding and dilation must have {dims} elements each")
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or groups < 1:
        raise ValueError("stride, dilation and groups must be positive, padding not negative")
    outputs, inputs = weight_size[:2]
    expected = (inputs * groups, outputs) if transposed else (outputs, inputs * groups)
    if (grad.shape[1], input_size[1]) != expected or outputs % groups or grad.shape[0] != input_size[0]:
        raise ValueError(
            f"a weight {tuple(weight_size)} in {groups} groups does not go with an input {tuple(input_size)} "
            f"and a gradient {tuple(grad.shape)}"
        )
    for i in range(dims):
        reach = dilation[i] * (weight_size[2 + i] - 1) + 1
        size, out = input_size[2 + i], grad.shape[2 + i]
        if transposed:
            least = (size - 1) * stride[i] - 2 * padding[i] + reach
            fits = least <= out < least + max(stride[i], dilation[i])
        else:
            fits = out == (size + 2 * padding[i] - reach) // stride[i] + 1
        if not fits or weight_size[2 + i] < 1 or out < 1:
            raise ValueError(f"a gradient {tuple(grad.shape)} is not that of an input {tuple(input_size)} here")


def _fake_conv(
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
    backend: str = "auto",
) -> Tensor:
    return grad.new_empty(weight_size)


def _run_linear(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int, backend: str = "auto") -> Tensor:
    if check_float(grad, "grad").dim() != 2 or inputs < 1:
        raise ValueError(f"grad must be [rows, outputs], got {tuple(grad.shape)}, and inputs positive, got {inputs}")
    check_parts(values, bitmask, grad.shape[0] * inputs)
    _check_alike(grad, values)
    pays = backend != "auto" or linear_weight_grad_pays(values.numel(), grad, inputs)
    found = implementation("sparse_grad", backend if pays else "reference", grad.device.type)
    return found.linear_weight_grad(grad.detach(), values.detach(), bitmask, inputs)


def _fake_linear(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int, backend: str = "auto") -> Tensor:
    return grad.new_empty(grad.shape[1], inputs)


_conv_op = define_op(
    "conv_weight_grad(Tensor grad, Tensor values, Tensor bitmask, SymInt[] input_size, SymInt[] input_stride, "
    "SymInt[] weight_size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt groups, "
    'str backend="auto") -> Tensor',
    _run_conv,
    _fake_conv,
)
_linear_op = define_op(
    'linear_weight_grad(Tensor grad, Tensor values, Tensor bitmask, SymInt inputs, str backend="auto") -> Tensor',
    _run_linear,
    _fake_linear,
)
