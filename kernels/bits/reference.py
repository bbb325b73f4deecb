"""The oracle: what the bit layout means, in the fewest words."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.layout import bit_bytes


def pack_bits(mask: Tensor) -> Tensor:
    padded = torch.zeros(bit_bytes(mask.numel()) * 8, dtype=torch.uint8, device=mask.device)
    padded[: mask.numel()] = mask
    return (padded.view(-1, 8) << _places(mask)).sum(dim=1, dtype=torch.uint8)


def pack_sign(x: Tensor) -> Tensor:
    return pack_bits(~(x <= 0))


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    check_stray(bits, numel)
    return (bits.unsqueeze(1) >> _places(bits) & 1).bool().view(-1)[:numel]


def unpack_value(bits: Tensor, numel: int, value: Tensor) -> Tensor:
    return torch.where(unpack_bits(bits, numel), value, 0.0)


def mask_by_bits(x: Tensor, bits: Tensor) -> Tensor:
    return torch.where(unpack_bits(bits, x.numel()), x, 0.0)


def check_stray(bits: Tensor, numel: int) -> None:
    """ValueError if bits behind the last element are set. Other devices are not waited for: there they are ignored."""
    if bits.device.type == "cpu" and numel % 8 and int(bits[-1]) >> numel % 8:
        raise ValueError(stray_bits(numel))


def stray_bits(numel: int) -> str:
    return f"the bitmask has bits set behind the last of {numel} elements; its last byte must be filled with zeros"


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
