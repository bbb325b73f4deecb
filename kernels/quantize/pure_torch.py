"""The reference, a piece at a time, so that temporaries stay small."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.quantize import reference
from surgeon_fx.kernels.quantize.reference import BLOCK, scale_dtype

PIECE = 1 << 18  # elements: whole blocks


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(flat.numel(), dtype=torch.int8, device=flat.device)
    scales = torch.empty(-(-flat.numel() // BLOCK), dtype=scale_dtype(flat.dtype), device=flat.device)
    for begin in range(0, flat.numel(), PIECE):
        found = reference.quantize(flat[begin : begin + PIECE])
        codes[begin : begin + PIECE], scales[begin // BLOCK : (begin + PIECE) // BLOCK] = found
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    flat = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
    for begin in range(0, codes.numel(), PIECE):
        piece = scales[begin // BLOCK : (begin + PIECE) // BLOCK]
        flat[begin : begin + PIECE] = reference.dequantize(codes[begin : begin + PIECE], piece, dtype)
    return flat
