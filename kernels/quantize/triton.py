"""8-bit codes on CUDA, ROCm and XPU: a program takes 64 blocks, one read and one write of each element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgeon_fx.kernels.compress.triton import NUM_WARPS, on_device
from surgeon_fx.kernels.quantize.reference import BLOCK, scale_dtype

ROWS = 64  # blocks per program


@triton.jit
def quantize_kernel(
    x, n, codes, scales, TINY: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    block = tl.load(x + at, mask=at < n, other=0).to(scales.dtype.element_ty)
    finite = tl.abs(block) < float("inf")  # NaN is not
    most = tl.max(tl.where(finite, tl.abs(block), 0.0), axis=1)
    whole = tl.min(finite.to(tl.int32), axis=1) != 0
    if scales.dtype.element_ty == tl.float64:
        scale = most / 127.0
    else:
        scale = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32))  # "/" is not rounded to nearest in float32
    scale = tl.where(scale < TINY, 0.0, scale)
    by = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], block.shape)
    block = tl.where(finite & whole[:, None], block, 0.0)
    code = block / by if scales.dtype.element_ty == tl.float64 else tl.div_rn(block, by)
    code = (code + ROUND) - ROUND  # leaves a whole number, ties to even
    tl.store(codes + at, code.to(tl.int32).to(tl.int8), mask=at < n)
    scale = tl.where(whole, scale, float("nan"))
    tl.store(scales + row, scale, mask=row * SIZE < n)


@triton.jit
def dequantize_kernel(codes, scales, n, out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    scale = tl.load(scales + row, mask=row * SIZE < n, other=0)
    code = tl.load(codes + at, mask=at < n, other=0).to(scales.dtype.element_ty)
    value = code * scale[:, None]
    if out.dtype.element_ty == tl.bfloat16:  # rounded here: the interpreter's cast cuts off
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


def constants(wide: torch.dtype) -> dict[str, float]:
    """The smallest scale, and what leaves a whole number when it is added and taken away."""
    return {"TINY": torch.finfo(wide).tiny, "ROUND": 1.5 * 2.0 ** (52 if wide is torch.float64 else 23)}


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    n, wide = flat.numel(), scale_dtype(flat.dtype)
    codes = torch.empty(n, dtype=torch.int8, device=flat.device)
    scales = torch.empty(triton.cdiv(n, BLOCK), dtype=wide, device=flat.device)
    if n:
        with on_device(flat):
            quantize_kernel[(triton.cdiv(n, ROWS * BLOCK),)](
                flat,
                n,
                codes,
                scales,
                **constants(wide),
                ROWS=ROWS,
                SIZE=BLOCK,
                num_warps=NUM_WARPS,
            )
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
    if codes.numel():
        with on_device(codes):
            dequantize_kernel[(triton.cdiv(codes.numel(), ROWS * BLOCK),)](
                codes, scales, codes.numel(), out, ROWS=ROWS, SIZE=BLOCK, num_warps=NUM_WARPS
            )
    return out
