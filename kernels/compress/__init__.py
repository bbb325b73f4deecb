"""Keep the largest magnitudes of a tensor, and one bit per element to say which.

    values    the `kept_count(numel, ratio)` elements of largest |x|, in memory order. Ties go to the lowest memory
              index; NaN counts as largest, so it is never dropped in silence
    bitmask   bit i % 8 of byte i // 8 is set where element i, in memory order, is kept

Sizes depend on (numel, ratio) alone. Where everything is kept the values are the tensor and there is no mask; where
nothing is, there is neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import check_backend, define_op, implementation
from surgeon_fx.kernels.layout import (
    FLOAT_BITS,
    check_layout,
    check_ratio,
    check_tensor,
    densify,
    flatten,
    kept_count,
    mask_bytes,
    unflatten,
)


@dataclass(frozen=True, eq=False)
class Compressed:
    """A pruned tensor: its kept values, their bitmask, and the layout of the tensor they came from."""

    values: Tensor
    bitmask: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes held: values and mask."""
        return self.values.nbytes + self.bitmask.nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.numel * self.values.element_size()

    def __repr__(self) -> str:
        kept = f"{self.kept} of {self.numel} kept" if self.kept < self.numel else "dense"
        return f"Compressed({tuple(self.shape)}, {self.dtype}, {kept}, {self.nbytes} of {self.dense_nbytes} bytes)"


def check_float(x: Tensor, name: str = "x") -> Tensor:
    """A strided float tensor, detached; else a clear error."""
    if check_tensor(x, name).layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor, got layout {x.layout}; call .to_dense() first")
    if x.dtype not in FLOAT_BITS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_BITS)
        raise ValueError(f"{name} must be one of {names}, got {str(x.dtype).removeprefix('torch.')}")
    return x.detach() if x.requires_grad else x


def compress(x: Tensor, ratio: float, backend: str = "auto") -> Compressed:
    """Drops the share `ratio` of the elements of smallest magnitude. Not differentiable."""
    x = densify(check_float(x))  # dense here, for the strides
    values, bitmask = _compress_op(x, check_ratio(ratio), check_backend(backend))
    return Compressed(values, bitmask, tuple(x.shape), x.stride())


def decompress(compressed: Compressed, backend: str = "auto") -> Tensor:
    """The tensor with zeros where elements were dropped, in the memory layout of the original."""
    c = compressed
    if not isinstance(c, Compressed):
        raise TypeError(f"compressed must be what `compress` returned, got {type(c).__name__}")
    check_tensor(c.values, "values")
    check_tensor(c.bitmask, "bitmask")
    return _decompress_op(c.values, c.bitmask, c.shape, c.stride, check_backend(backend))


def pick(x: Tensor, bitmask: Tensor, kept: int, backend: str = "auto") -> Tensor:
    """The elements of x whose bits are set, in memory order: `compress` where others have chosen. Not differentiable.

    `bitmask` has `kept` bits set, as that of a compressed tensor of as many elements has; empty where all are kept.
    """
    return _pick_op(densify(check_float(x)), check_tensor(bitmask, "bitmask"), kept, check_backend(backend))


def check_parts(values: Tensor, bitmask: Tensor, numel: int) -> None:
    check_float(values, "values")
    if bitmask.dtype is not torch.uint8:
        raise ValueError(f"bitmask must be uint8, got {bitmask.dtype}")
    if bitmask.device != values.device:
        raise ValueError(f"values and bitmask must be on one device, got {values.device} and {bitmask.device}")
    if values.dim() != 1 or bitmask.dim() != 1 or not values.is_contiguous() or not bitmask.is_contiguous():
        raise ValueError("values and bitmask must be contiguous vectors")
    if values.numel() > numel:
        raise ValueError(f"there are {values.numel()} values for a tensor of {numel} elements")
    if bitmask.numel() != (expected := mask_bytes(numel, values.numel())):
        raise ValueError(
            f"bitmask has {bitmask.numel()} bytes; {values.numel()} values of {numel} elements go with {expected}"
        )


def _run_compress(x: Tensor, ratio: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    flat = flatten(densify(check_float(x)))
    numel, kept = flat.numel(), kept_count(flat.numel(), ratio)
    if not mask_bytes(numel, kept):
        return flat[:kept].clone(), flat.new_empty(0, dtype=torch.uint8)
    return implementation("compress", backend, x.device.type).compress(flat, kept)


def _fake_compress(x: Tensor, ratio: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    kept = kept_count(check_float(x).numel(), ratio)
    return x.new_empty(kept), x.new_empty(mask_bytes(x.numel(), kept), dtype=torch.uint8)


def _run_decompress(
    values: Tensor, bitmask: Tensor, size: Sequence[int], stride: Sequence[int], backend: str = "auto"
) -> Tensor:
    numel = math.prod(size)
    check_layout(size, stride)
    check_parts(values, bitmask, numel)
    values = values.detach()
    if values.numel() == numel:
        flat = values.clone()
    elif values.numel() == 0:
        flat = values.new_zeros(numel)
    else:
        flat = implementation("compress", backend, values.device.type).decompress(values, bitmask, numel)
    return unflatten(flat, size, stride)


def _fake_decompress(
    values: Tensor, bitmask: Tensor, size: Sequence[int], stride: Sequence[int], backend: str = "auto"
) -> Tensor:
    check_parts(values, bitmask, math.prod(size))
    return values.new_empty_strided(size, stride)


def _run_pick(x: Tensor, bitmask: Tensor, kept: int, backend: str = "auto") -> Tensor:
    flat = flatten(densify(check_float(x)))
    if not 0 <= kept <= flat.numel():
        raise ValueError(f"kept must be 0 to {flat.numel()}, got {kept}")
    check_parts(flat[:kept], bitmask, flat.numel())
    if not mask_bytes(flat.numel(), kept):
        return flat[:kept].clone()
    return implementation("compress", backend, x.device.type).pick(flat, bitmask, kept)


def _fake_pick(x: Tensor, bitmask: Tensor, kept: int, backend: str = "auto") -> Tensor:
    return x.new_empty(kept)


_compress_op = define_op(
    'compress(Tensor x, float ratio, str backend="auto") -> (Tensor values, Tensor bitmask)',
    _run_compress,
    _fake_compress,
)
_decompress_op = define_op(
    'decompress(Tensor values, Tensor bitmask, SymInt[] size, SymInt[] stride, str backend="auto") -> Tensor',
    _run_decompress,
    _fake_decompress,
)
_pick_op = define_op(
    'pick(Tensor x, Tensor bitmask, SymInt kept, str backend="auto") -> Tensor',
    _run_pick,
    _fake_pick,
)
