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
    return (bits.unsqueeze(1) >> _places(bits) & 1).bool().view(-1)[:numel]


def unpack_value(bits: Tensor, numel: int, value: Tensor) -> Tensor:
    return torch.where(unpack_bits(bits, numel), value, 0.0)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
