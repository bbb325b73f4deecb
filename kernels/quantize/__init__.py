"""8-bit codes for activations that may not be pruned: symmetric, one scale per block of 64 elements in memory order.

    scales    max|x| / 127 of each block, in float32 (float64 for double precision)
    codes     x / scale, rounded to nearest, ties to even, as int8; back: code * scale, rounded to the type of x

Zero stays zero. A block that holds NaN or an infinity comes back as NaN, all of it: nothing is lost in silence. A block
whose scale would not be a normal number comes back as zeros. Sizes depend on the number of elements alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import check_backend, define_op, implementation
from surgeon_fx.kernels.compress import check_float
from surgeon_fx.kernels.layout import check_tensor, densify, flatten
from surgeon_fx.kernels.quantize.reference import BLOCK, scale_dtype


def scale_count(numel: int) -> int:
    """How many scales go with so many elements."""
    return -(-numel // BLOCK)


def quantized_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of codes and scales."""
    return numel + scale_count(numel) * scale_dtype(dtype).itemsize


def quantize(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor's elements, as vectors in memory order."""
    return _quantize_op(densify(check_float(x)), check_backend(backend))


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    """The elements behind codes and scales, as a vector in memory order."""
    _check_codes(codes, scales, dtype)
    return _dequantize_op(codes, scales, dtype, check_backend(backend))


def _check_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    check_float(scales.new_empty(0, dtype=dtype))
    if check_tensor(codes, "codes").dtype is not torch.int8 or codes.dim() != 1 or not codes.is_contiguous():
        raise ValueError(f"codes must be a contiguous int8 vector, got {codes.dtype} of shape {tuple(codes.shape)}")
    wanted = scale_dtype(dtype)
    if check_tensor(scales, "scales").dtype is not wanted or scales.dim() != 1 or not scales.is_contiguous():
        raise ValueError(f"scales must be a contiguous {wanted} vector, got {scales.dtype} {tuple(scales.shape)}")
    if scales.numel() != scale_count(codes.numel()) or scales.device != codes.device:
        raise ValueError(
            f"scales has {scales.numel()} elements on {scales.device}; {codes.numel()} codes on {codes.device} go with "
            f"{scale_count(codes.numel())} on their device"
        )


def _run_quantize(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    flat = flatten(densify(check_float(x)))
    return implementation("quantize", backend, x.device.type).quantize(flat)


def _run_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    _check_codes(codes, scales, dtype)
    return implementation("quantize", backend, codes.device.type).dequantize(codes, scales, dtype)


def _fake_quantize(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    numel = x.numel()
    return x.new_empty(numel, dtype=torch.int8), x.new_empty(scale_count(numel), dtype=scale_dtype(x.dtype))


def _fake_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    return codes.new_empty(codes.numel(), dtype=dtype)


_quantize_op = define_op(
    'quantize(Tensor x, str backend="auto") -> (Tensor codes, Tensor scales)', _run_quantize, _fake_quantize
)
_dequantize_op = define_op(
    'dequantize(Tensor codes, Tensor scales, ScalarType dtype, str backend="auto") -> Tensor',
    _run_dequantize,
    _fake_dequantize,
)
