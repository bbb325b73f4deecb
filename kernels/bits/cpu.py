"""The C kernels (kernels/native) on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.bits.reference import stray_bits
from surgeon_fx.kernels.layout import FLOAT_BITS, bit_bytes
from surgeon_fx.kernels.native import library, threads


def pack_bits(mask: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(mask.numel()), dtype=torch.uint8, device="cpu")
    library().sfx_pack_bits(mask.data_ptr(), mask.numel(), bits.data_ptr(), threads())
    return bits


def pack_sign(x: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(x.numel()), dtype=torch.uint8, device="cpu")
    library().sfx_pack_sign(
        x.data_ptr(), x.numel(), x.element_size(), FLOAT_BITS[x.dtype].inf, bits.data_ptr(), threads()
    )
    return bits


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    mask = torch.empty(numel, dtype=torch.bool, device="cpu")
    if library().sfx_unpack_bits(bits.data_ptr(), numel, mask.data_ptr(), threads()):
        raise ValueError(stray_bits(numel))
    return mask


def unpack_value(bits: Tensor, numel: int, value: Tensor) -> Tensor:
    out = torch.empty(numel, dtype=value.dtype, device="cpu")
    width = value.element_size()
    pattern = int(value.view(FLOAT_BITS[value.dtype].integer)) & ((1 << 8 * width) - 1)
    if library().sfx_select(bits.data_ptr(), numel, width, None, pattern, out.data_ptr(), threads()):
        raise ValueError(stray_bits(numel))
    return out


def mask_by_bits(x: Tensor, bits: Tensor) -> Tensor:
    out = torch.empty_like(x)
    given = (bits.data_ptr(), x.numel(), x.element_size(), x.data_ptr(), 0, out.data_ptr())
    if library().sfx_select(*given, threads()):
        raise ValueError(stray_bits(x.numel()))
    return out
