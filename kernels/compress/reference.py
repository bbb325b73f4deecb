"""The oracle: what compression means, in the fewest words."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.bits.reference import pack_bits, unpack_bits
from surgeon_fx.kernels.layout import FLOAT_BITS, keys


def compress(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    largest = torch.sort(keys(flat), descending=True, stable=True).indices[:kept]
    keep = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    keep[largest] = True
    return flat[keep], pack_bits(keep)


def decompress(values: Tensor, bitmask: Tensor, numel: int) -> Tensor:
    keep = unpack_bits(bitmask, numel)
    check_mask(bitmask, values.numel(), keep)
    flat = values.new_zeros(numel)
    bits = FLOAT_BITS[values.dtype].integer  # as floats, NaN payloads would not survive
    flat.view(bits)[keep] = values.view(bits)
    return flat


def pick(flat: Tensor, bitmask: Tensor, kept: int) -> Tensor:
    keep = unpack_bits(bitmask, flat.numel())
    check_mask(bitmask, kept, keep)
    return flat[keep]


def check_mask(bitmask: Tensor, kept: int, keep: Tensor) -> None:
    """ValueError unless the mask has one bit for each value and none behind the last element."""
    last = keep.numel() % 8
    stray = last and int(bitmask[-1]) >> last
    if stray or int(keep.sum()) != kept:
        raise ValueError(mask_mismatch(kept))


def mask_mismatch(kept: int) -> str:
    return f"bitmask does not go with the values: it must have {kept} bits set, all within the tensor"
