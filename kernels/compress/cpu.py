"""The C kernels (kernels/native) on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.compress.reference import mask_mismatch
from surgeon_fx.kernels.layout import FLOAT_BITS, bit_bytes
from surgeon_fx.kernels.native import call, threads


def compress(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    values = flat.new_empty(kept)
    bitmask = torch.empty(bit_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
    compress_into(flat, values, bitmask)
    return values, bitmask


def compress_into(flat: Tensor, values: Tensor, bitmask: Tensor) -> None:
    call(
        "sfx_compress",
        flat.data_ptr(),
        flat.numel(),
        flat.element_size(),
        FLOAT_BITS[flat.dtype].inf,
        values.numel(),
        values.data_ptr(),
        bitmask.data_ptr(),
        threads(),
    )


def compress_normalised(flat: Tensor, mean: Tensor, rstd: Tensor, length: int, kept: int) -> tuple[Tensor, Tensor]:
    """Of runs of `length` elements, which take the statistics in turn."""
    values = flat.new_empty(kept)
    bitmask = torch.empty(bit_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
    call(
        "sfx_compress_normalised",
        flat.data_ptr(),
        flat.numel(),
        mean.data_ptr(),
        rstd.data_ptr(),
        length,
        mean.numel(),
        kept,
        values.data_ptr(),
        bitmask.data_ptr(),
        threads(),
    )
    return values, bitmask


def decompress(values: Tensor, bitmask: Tensor, numel: int) -> Tensor:
    flat = values.new_empty(numel)
    decompress_into(values, bitmask, flat)
    return flat


def decompress_into(values: Tensor, bitmask: Tensor, flat: Tensor) -> None:
    mismatch = call(
        "sfx_decompress",
        values.data_ptr(),
        values.numel(),
        bitmask.data_ptr(),
        flat.numel(),
        flat.element_size(),
        flat.data_ptr(),
        threads(),
    )
    if mismatch:
        raise ValueError(mask_mismatch(values.numel()))


def pick(flat: Tensor, bitmask: Tensor, kept: int) -> Tensor:
    values = flat.new_empty(kept)
    mismatch = call(
        "sfx_pick",
        flat.data_ptr(),
        flat.numel(),
        flat.element_size(),
        bitmask.data_ptr(),
        kept,
        values.data_ptr(),
        threads(),
    )
    if mismatch:
        raise ValueError(mask_mismatch(kept))
    return values
