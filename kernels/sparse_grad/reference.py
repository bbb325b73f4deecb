"""What the kernels compute: the native weight gradient over the restored input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon_fx.kernels.compress import Compressed, decompress


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
    x = decompress(Compressed(values, bitmask, tuple(input_size), tuple(input_stride)))
    weight = grad.new_empty(weight_size)  # not read
    output_padding = [0] * len(stride)
    if transposed:
        least = [
            (size - 1) * step - 2 * pad + reach * (taps - 1) + 1
            for size, step, pad, reach, taps in zip(
                input_size[2:], stride, padding, dilation, weight_size[2:], strict=True
            )
        ]
        output_padding = [out - size for out, size in zip(grad.shape[2:], least, strict=True)]
    geometry = (list(stride), list(padding), list(dilation), transposed, output_padding, groups)
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [False, True, False])[1]


def linear_weight_grad(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int) -> Tensor:
    size = (grad.shape[0], inputs)
    return grad.t().mm(decompress(Compressed(values, bitmask, size, (inputs, 1))))
