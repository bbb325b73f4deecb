"""Bit packing with torch operations alone: eight booleans are one 64-bit integer, and one multiplication packs them."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.bits.reference import check_stray
from surgeon_fx.kernels.layout import bit_bytes

BLOCK = 1 << 20
PACK = 0x0102040810204080  # sends the low bit of byte i to bit i of the top byte


def pack_bits(mask: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    for begin in range(0, mask.numel(), BLOCK):
        pack_into(mask[begin : begin + BLOCK], bits[begin // 8 :])
    return bits


def pack_sign(x: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    for begin in range(0, x.numel(), BLOCK):
        pack_into((x[begin : begin + BLOCK] <= 0).logical_not_(), bits[begin // 8 :])
    return bits


def pack_into(mask: Tensor, bits: Tensor) -> None:
    """Packs into the first bytes of `bits`."""
    whole = mask.numel() // 8 * 8
    if whole != mask.numel() or mask.storage_offset() % 8:
        mask = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))
    words = mask.view(torch.int64)
    bits[: words.numel()] = (words * PACK) >> 56 & 0xFF


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    check_stray(bits, numel)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask = torch.empty(bits.numel(), 8, dtype=torch.uint8, device=bits.device)
    torch.bitwise_right_shift(bits.unsqueeze(1), places, out=mask)
    return mask.bitwise_and_(1).view(torch.bool).view(-1)[:numel]


def unpack_value(bits: Tensor, numel: int, value: Tensor) -> Tensor:
    return unpack_bits(bits, numel).to(value.dtype).mul_(value)


def mask_by_bits(x: Tensor, bits: Tensor) -> Tensor:
    return torch.where(unpack_bits(bits, x.numel()), x, 0.0)
