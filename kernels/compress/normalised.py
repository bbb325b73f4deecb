"""`compress` of (x - mean) * rstd, which is never written out: what a norm keeps of its input.

The C kernels make it anew from x in each of their passes, a chunk at a time, for float32 in contiguous memory or with
channels last. Elsewhere the dense tensor is computed and compressed, which is also the reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend, define_op
from surgeon_fx.kernels.compress import Compressed, check_float, compress
from surgeon_fx.kernels.layout import check_ratio, densify, flatten, kept_count, laid_out, mask_bytes

SHORTEST_RUN = 16  # elements of a channel in one sample or of a row, or channels side by side; fewer do not pay


def compress_normalised(x: Tensor, mean: Tensor, rstd: Tensor, by: str, ratio: float) -> Compressed:
    """`compress((x - mean) * rstd, ratio)`. Not differentiable.

    By "channel" there is one mean and one rstd for each index of the second dimension; by "row", one for each of the
    equal parts that a contiguous x is cut into.
    """
    x = densify(check_float(x))
    values, bitmask = _compress_normalised_op(x, mean.detach(), rstd.detach(), by, check_ratio(ratio))
    return Compressed(values, bitmask, tuple(x.shape), x.stride())


def compress_normalised_pays(x: Tensor, mean: Tensor, by: str) -> bool:
    """Whether the kernels do it, and faster than the dense way."""
    if not _is_native(x, mean, mean, by):
        return False
    length = _run_length(x, mean, mean, by)
    return (mean.numel() if length == 1 and by == "channel" else length) >= SHORTEST_RUN


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, by: str) -> Tensor:
    """The dense tensor, in the memory order of x."""
    _run_length(x, mean, rstd, by)
    view, shape = (x, (-1, *[1] * (x.dim() - 2))) if by == "channel" else (x.reshape(mean.numel(), -1), (-1, 1))
    hat = view.sub(mean.reshape(shape)).mul_(rstd.reshape(shape)).to(x.dtype).view(x.shape)
    return laid_out(hat, x.shape, x.stride())


def _is_native(x: Tensor, mean: Tensor, rstd: Tensor, by: str) -> bool:
    """The C kernels read float32: contiguous statistics, and x in a layout whose runs they know."""
    return (
        all(one.dtype is torch.float32 and active_backend(one.device.type) == "cpu" for one in (x, mean, rstd))
        and mean.is_contiguous()
        and rstd.is_contiguous()
        and (x.is_contiguous() or (by == "channel" and _has_channels_last(x)))
    )


def _has_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.stride(1) == 1 and x.movedim(1, -1).is_contiguous()


def _run_length(x: Tensor, mean: Tensor, rstd: Tensor, by: str) -> int:
    """How many neighbours in memory have the same statistics."""
    groups = mean.numel()
    if by not in ("channel", "row"):
        raise ValueError(f'by must be "channel" or "row", got {by!r}')
    if rstd.numel() != groups:
        raise ValueError(f"mean and rstd must have as many elements as each other, got {groups} and {rstd.numel()}")
    if by == "channel":
        if x.dim() < 2 or groups != x.shape[1]:
            raise ValueError(f"mean must have one element for each channel of {tuple(x.shape)}, got {groups}")
        return math.prod(x.shape[2:]) if x.is_contiguous() else 1
    if not groups or x.numel() % groups:
        raise ValueError(f"mean must have one element for each row, and {tuple(x.shape)} is not {groups} equal rows")
    return x.numel() // groups


def _run(x: Tensor, mean: Tensor, rstd: Tensor, by: str, ratio: float) -> tuple[Tensor, Tensor]:
    x = densify(check_float(x))
    length, kept = _run_length(x, mean, rstd, by), kept_count(x.numel(), ratio)
    if not kept:
        return x.new_empty(0), x.new_empty(0, dtype=torch.uint8)
    if kept == x.numel():
        return flatten(normalise(x, mean, rstd, by)), x.new_empty(0, dtype=torch.uint8)
    if not _is_native(x, mean, rstd, by):
        found = compress(normalise(x, mean, rstd, by), ratio)
        return found.values, found.bitmask
    from surgeon_fx.kernels.compress import cpu

    return cpu.compress_normalised(flatten(x), mean, rstd, length, kept)


def _fake(x: Tensor, mean: Tensor, rstd: Tensor, by: str, ratio: float) -> tuple[Tensor, Tensor]:
    _run_length(check_float(x), mean, rstd, by)
    kept = kept_count(x.numel(), ratio)
    return x.new_empty(kept), x.new_empty(mask_bytes(x.numel(), kept), dtype=torch.uint8)


_compress_normalised_op = define_op(
    "compress_normalised(Tensor x, Tensor mean, Tensor rstd, str by, float ratio) -> (Tensor values, Tensor bitmask)",
    _run,
    _fake,
)
