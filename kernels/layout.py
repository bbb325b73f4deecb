"""The facts every backend, planner and test shares: how much is kept, how bits and elements lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FloatBits(NamedTuple):
    """A float type as integers: the type of its bits, and the bits of infinity.

    Magnitudes are ordered by ``key = min(bits & ~sign, inf + 1)``: the order of ``|x|``, with every NaN above infinity
    and equal to every other.
    """

    integer: torch.dtype
    inf: int

    @property
    def magnitude(self) -> int:
        return int(torch.iinfo(self.integer).max)

    @property
    def nan_key(self) -> int:
        return self.inf + 1


FLOAT_BITS = {
    torch.float32: FloatBits(torch.int32, 0x7F800000),
    torch.float64: FloatBits(torch.int64, 0x7FF0000000000000),
    torch.bfloat16: FloatBits(torch.int16, 0x7F80),
    torch.float16: FloatBits(torch.int16, 0x7C00),
}


def keys(flat: Tensor) -> Tensor:
    """Integers that order the elements by magnitude."""
    bits = FLOAT_BITS[flat.dtype]
    return (flat.view(bits.integer) & bits.magnitude).clamp_(max=bits.nan_key)


def check_ratio(ratio: float) -> float:
    """The ratio as a float in [0, 1], or a ValueError."""
    try:
        value = math.nan if isinstance(ratio, bool) else float(ratio)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"ratio must be the share to drop, between 0 and 1, got {ratio}")
    return value


def kept_count(numel: int, ratio: float) -> int:
    """How many of ``numel`` elements survive pruning: ``numel - floor(numel * ratio)``.

    Never drops more than asked, so at least one element of a non-empty tensor survives any ratio below 1.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return numel - math.floor(numel * check_ratio(ratio))


def bit_bytes(numel: int) -> int:
    """Bytes of a packed mask: one bit per element, least significant bit first, the last byte filled with zeros."""
    return (numel + 7) // 8


def mask_bytes(numel: int, kept: int) -> int:
    """Bytes of the mask that goes with ``kept`` of ``numel`` values: none where all or nothing is kept."""
    return bit_bytes(numel) if 0 < kept < numel else 0


def check_tensor(x: object, name: str) -> Tensor:
    """A tensor, or a TypeError."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    return x


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order of the dimensions."""
    return x.is_contiguous() or fills_one_block(x.shape, x.stride())


def fills_one_block(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a layout visits each of its elements' places once, without gaps."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a layout is what torch calls contiguous."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def check_layout(shape: Sequence[int], stride: Sequence[int] | None) -> None:
    """ValueError unless a tensor can have this shape and, where given, these dense strides."""
    if any(size < 0 for size in shape):
        raise ValueError(f"shape must not be negative, got {tuple(shape)}")
    if stride is None or math.prod(shape) == 0:
        return
    if len(stride) != len(shape) or not fills_one_block(shape, stride):
        raise ValueError(f"stride must be of a dense layout of shape {tuple(shape)}, got {tuple(stride)}")


def densify(x: Tensor) -> Tensor:
    """``x`` where it is dense, else a dense copy in the same order of dimensions."""
    return x if is_dense(x) else x.clone(memory_format=torch.preserve_format)


def flatten(x: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a view."""
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def unflatten(flat: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The inverse of `flatten`."""
    return flat.as_strided(tuple(shape), tuple(stride))


def laid_out(x: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """`x` where its memory has these strides, else a copy that has."""
    if all(size == 1 or a == b for size, a, b in zip(shape, x.stride(), stride, strict=True)):
        return x
    return x.new_empty_strided(tuple(shape), tuple(stride)).copy_(x)
