"""One bit per element: bit i % 8 of byte i // 8 is element i in memory order; the last byte is filled with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import check_backend, define_op, implementation
from surgeon_fx.kernels.compress import check_float
from surgeon_fx.kernels.layout import bit_bytes, check_layout, check_tensor, densify, flatten, unflatten


def pack_bits(mask: Tensor, backend: str = "auto") -> Tensor:
    """A boolean tensor as bits."""
    return _pack_bits_op(densify(_check_mask(mask)), check_backend(backend))


def pack_sign(x: Tensor, backend: str = "auto") -> Tensor:
    """The bits of `~(x <= 0)`: where x is positive or NaN, which is where ReLU passes the gradient."""
    return _pack_sign_op(densify(check_float(x)), check_backend(backend))


def unpack_bits(
    bits: Tensor, shape: int | Sequence[int], stride: Sequence[int] | None = None, backend: str = "auto"
) -> Tensor:
    """The boolean tensor behind `bits`, contiguous unless the strides of a dense layout are given."""
    size = _check_size(shape, stride)
    _check_bits(bits, size.numel())
    flat = _unpack_bits_op(bits, size.numel(), check_backend(backend))
    return flat.view(size) if stride is None else unflatten(flat, size, stride)


def unpack_value(
    bits: Tensor, value: Tensor, shape: int | Sequence[int], stride: Sequence[int] | None = None, backend: str = "auto"
) -> Tensor:
    """`value`, a tensor of one element, where a bit is set, and zero elsewhere; laid out as `unpack_bits` does."""
    size = _check_size(shape, stride)
    _check_bits(bits, size.numel())
    if check_float(value).numel() != 1 or value.device != bits.device:
        raise ValueError(f"value must be one number on {bits.device}, got shape {tuple(value.shape)} on {value.device}")
    flat = _unpack_value_op(bits, size.numel(), value.reshape(1), check_backend(backend))
    return flat.view(size) if stride is None else unflatten(flat, size, stride)


def mask_by_bits(x: Tensor, bits: Tensor, backend: str = "auto") -> Tensor:
    """`x` where the bit of an element, in memory order, is set, and zero elsewhere; laid out as `x`."""
    x = densify(check_float(x))
    _check_bits(bits, x.numel())
    if bits.device != x.device:
        raise ValueError(f"x and bits must be on one device, got {x.device} and {bits.device}")
    return _mask_by_bits_op(x, bits, check_backend(backend))


def _check_mask(mask: Tensor) -> Tensor:
    if check_tensor(mask, "mask").dtype is not torch.bool:
        raise ValueError(f"mask must be a boolean tensor, got {mask.dtype}")
    return mask


def _check_size(shape: int | Sequence[int], stride: Sequence[int] | None) -> torch.Size:
    size = torch.Size((shape,) if isinstance(shape, int) else shape)
    check_layout(size, stride)
    return size


def _check_bits(bits: Tensor, numel: int) -> None:
    if check_tensor(bits, "bits").dtype is not torch.uint8 or bits.dim() != 1 or not bits.is_contiguous():
        raise ValueError(f"bits must be a contiguous uint8 vector, got {bits.dtype} of shape {tuple(bits.shape)}")
    if bits.numel() != bit_bytes(numel):
        raise ValueError(f"bits has {bits.numel()} bytes; {numel} elements go with {bit_bytes(numel)}")


def _run_pack_bits(mask: Tensor, backend: str = "auto") -> Tensor:
    return implementation("bits", backend, mask.device.type).pack_bits(flatten(densify(_check_mask(mask))))


def _run_pack_sign(x: Tensor, backend: str = "auto") -> Tensor:
    return implementation("bits", backend, x.device.type).pack_sign(flatten(densify(check_float(x))))


def _run_unpack_bits(bits: Tensor, numel: int, backend: str = "auto") -> Tensor:
    _check_bits(bits, numel)
    return implementation("bits", backend, bits.device.type).unpack_bits(bits, numel)


def _run_unpack_value(bits: Tensor, numel: int, value: Tensor, backend: str = "auto") -> Tensor:
    _check_bits(bits, numel)
    return implementation("bits", backend, bits.device.type).unpack_value(bits, numel, value)


def _run_mask_by_bits(x: Tensor, bits: Tensor, backend: str = "auto") -> Tensor:
    x = densify(check_float(x))
    _check_bits(bits, x.numel())
    out = implementation("bits", backend, x.device.type).mask_by_bits(flatten(x), bits)
    return unflatten(out, x.shape, x.stride())


def _fake_pack_bits(mask: Tensor, backend: str = "auto") -> Tensor:
    return _fake_bits(_check_mask(mask))


def _fake_pack_sign(x: Tensor, backend: str = "auto") -> Tensor:
    return _fake_bits(check_float(x))


def _fake_bits(x: Tensor) -> Tensor:
    return x.new_empty(bit_bytes(x.numel()), dtype=torch.uint8)


def _fake_unpack(bits: Tensor, numel: int, backend: str = "auto") -> Tensor:
    return bits.new_empty(numel, dtype=torch.bool)


def _fake_unpack_value(bits: Tensor, numel: int, value: Tensor, backend: str = "auto") -> Tensor:
    return value.new_empty(numel)


def _fake_mask_by_bits(x: Tensor, bits: Tensor, backend: str = "auto") -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


_pack_bits_op = define_op('pack_bits(Tensor mask, str backend="auto") -> Tensor', _run_pack_bits, _fake_pack_bits)
_pack_sign_op = define_op('pack_sign(Tensor x, str backend="auto") -> Tensor', _run_pack_sign, _fake_pack_sign)
_unpack_bits_op = define_op(
    'unpack_bits(Tensor bits, SymInt numel, str backend="auto") -> Tensor', _run_unpack_bits, _fake_unpack
)
_unpack_value_op = define_op(
    'unpack_value(Tensor bits, SymInt numel, Tensor value, str backend="auto") -> Tensor',
    _run_unpack_value,
    _fake_unpack_value,
)
_mask_by_bits_op = define_op(
    'mask_by_bits(Tensor x, Tensor bits, str backend="auto") -> Tensor', _run_mask_by_bits, _fake_mask_by_bits
)
