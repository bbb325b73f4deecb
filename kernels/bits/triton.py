"""Bit packing on CUDA, ROCm and XPU: one read, one write, eight elements a byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgeon_fx.kernels.compress.triton import BLOCK, NUM_WARPS, keys_of, on_device, store_bits
from surgeon_fx.kernels.layout import FLOAT_BITS, bit_bytes


@triton.jit
def pack_bits_kernel(mask, n, bits, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    store_bits(bits, block, tl.load(mask + at, mask=at < n, other=0) != 0, n, SIZE)


@triton.jit
def pack_sign_kernel(x, n, bits, nan_key, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    raw = tl.load(x + at, mask=at < n, other=0)
    key = keys_of(raw, nan_key, WIDTH)
    store_bits(bits, block, (raw > 0) | (key == nan_key.to(key.dtype)), n, SIZE)


@triton.jit
def unpack_bits_kernel(bits, n, mask, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bits + at // 8, mask=at < n, other=0).to(tl.int32)
    tl.store(mask + at, ((byte >> (at % 8).to(tl.int32)) & 1).to(tl.uint8), mask=at < n)


@triton.jit
def unpack_value_kernel(bits, n, x, out, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bits + at // 8, mask=at < n, other=0).to(tl.int32)
    value = tl.load(x)
    tl.store(out + at, tl.where(((byte >> (at % 8).to(tl.int32)) & 1) != 0, value, value ^ value), mask=at < n)


@triton.jit
def mask_by_bits_kernel(x, bits, n, out, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bits + at // 8, mask=at < n, other=0).to(tl.int32)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.store(out + at, tl.where(((byte >> (at % 8).to(tl.int32)) & 1) != 0, value, value ^ value), mask=at < n)


def pack_bits(mask: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    if mask.numel():
        with on_device(mask):
            pack_bits_kernel[(triton.cdiv(mask.numel(), BLOCK),)](
                mask.view(torch.uint8), mask.numel(), bits, SIZE=BLOCK, num_warps=NUM_WARPS
            )
    return bits


def pack_sign(x: Tensor) -> Tensor:
    bits = torch.empty(bit_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    float_bits = FLOAT_BITS[x.dtype]
    if x.numel():
        with on_device(x):
            pack_sign_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x.view(float_bits.integer),
                x.numel(),
                bits,
                float_bits.nan_key,
                WIDTH=8 * x.element_size(),
                SIZE=BLOCK,
                num_warps=NUM_WARPS,
            )
    return bits


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    mask = torch.empty(numel, dtype=torch.bool, device=bits.device)
    if numel:
        with on_device(bits):
            unpack_bits_kernel[(triton.cdiv(numel, BLOCK),)](
                bits, numel, mask.view(torch.uint8), SIZE=BLOCK, num_warps=NUM_WARPS
            )
    return mask


def unpack_value(bits: Tensor, numel: int, value: Tensor) -> Tensor:
    out = torch.empty(numel, dtype=value.dtype, device=bits.device)
    integer = FLOAT_BITS[value.dtype].integer
    if numel:
        with on_device(bits):
            unpack_value_kernel[(triton.cdiv(numel, BLOCK),)](
                bits, numel, value.view(integer), out.view(integer), SIZE=BLOCK, num_warps=NUM_WARPS
            )
    return out


def mask_by_bits(x: Tensor, bits: Tensor) -> Tensor:
    out = torch.empty_like(x)
    integer = FLOAT_BITS[x.dtype].integer
    if x.numel():
        with on_device(x):
            mask_by_bits_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x.view(integer), bits, x.numel(), out.view(integer), SIZE=BLOCK, num_warps=NUM_WARPS
            )
    return out
