"""The C kernels (kernels/native/quantize.c) on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.native import library, threads
from surgeon_fx.kernels.quantize.reference import BLOCK, scale_dtype

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as quantize.h numbers them


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(flat.numel(), dtype=torch.int8, device="cpu")
    scales = torch.empty(-(-flat.numel() // BLOCK), dtype=scale_dtype(flat.dtype), device="cpu")
    library().sfx_quantize(
        flat.data_ptr(), flat.numel(), KINDS[flat.dtype], codes.data_ptr(), scales.data_ptr(), threads()
    )
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    flat = torch.empty(codes.numel(), dtype=dtype, device="cpu")
    library().sfx_dequantize(
        codes.data_ptr(), scales.data_ptr(), codes.numel(), KINDS[dtype], flat.data_ptr(), threads()
    )
    return flat
