"""The oracle: what codes and scales mean, in the fewest words."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # elements that share a scale
LARGEST = 127


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scales are kept and codes computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    wide = scale_dtype(flat.dtype)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).to(wide).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / LARGEST if blocks.numel() else flat.new_empty(0, dtype=wide)
    scales = torch.where(scales < torch.finfo(wide).tiny, 0.0, scales)
    scales = torch.where(blocks.isfinite().all(1), scales, torch.nan)
    by = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    codes = torch.where(scales.isnan().unsqueeze(1), 0.0, (blocks / by).round())
    return codes.to(torch.int8).view(-1)[: flat.numel()].clone(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = torch.nn.functional.pad(codes, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return (blocks * scales.unsqueeze(1)).to(dtype).view(-1)[: codes.numel()]
