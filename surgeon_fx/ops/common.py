"""What the families of operations share."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from surgeon_fx.distributed import is_dtensor
from surgeon_fx.ops.keep import is_prunable, keep_exactly
from surgeon_fx.ops.slots import Slot, mark, note

RECORDS = "surgeon_fx_records"  # in the metadata of an autograd node: records of what it keeps exactly
MAPPED_BYTES = 1 << 20  # of a tensor that is not read; a smaller one costs less than its mapping


def run_exactly(
    slot: Slot, native: Callable[..., Tensor], activations: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """The native function, whose own autograd node keeps `activations` as they are."""
    output = mark(native(*args, **kwargs), slot)
    if (node := output.grad_fn) is not None:
        remember_exact(slot, node, activations)
        if slot.group.observed:
            for x in activations:
                note(slot, node, "prune" if is_prunable(x) else "exact", x)
    return output


def remember_exact(slot: Slot, node: Any, activations: Sequence[Tensor]) -> None:
    """Has whoever prunes or rounds one of these share it, for as long as the native node keeps it as it is."""
    if slot.group.table.prunes or slot.group.exact_saves:
        node.metadata[RECORDS] = [keep_exactly(x) for x in activations]


def needs_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these that may be ours: tensor-parallel ones are native."""
    if not torch.is_grad_enabled():
        return False
    recorded = False
    for x in tensors:
        if x is not None:
            if is_dtensor(x):
                return False
            recorded = recorded or x.requires_grad
    return recorded


def is_parameter(x: Any) -> bool:
    return isinstance(x, nn.Parameter) or (isinstance(x, Tensor) and isinstance(x._base, nn.Parameter))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast runs matrix products in, where it is on for the tensor's device."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """As autocast casts: floating-point tensors but those of double precision."""
    if dtype is None or x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(dtype)


def each(value: int | Sequence[int], dims: int) -> list[int]:
    """A size for every dimension, as torch spreads one number over all of them."""
    return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)


def reduce_to(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums a gradient over the dimensions that broadcasting added."""
    return gradient if gradient.shape == torch.Size(shape) else gradient.sum_to_size(tuple(shape))


def stand_in(like: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for an operation that asks for the layout of an argument and does not read it. `like` is on its device.

    torch makes a contiguous argument of any other even then. So on a CPU it is contiguous where it should be, and takes
    no room: its memory is mapped and never touched. (It would read as zeros.)
    """
    if (size := _storage_bytes(shape, stride, dtype)) < MAPPED_BYTES:
        return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
    with unset_fake_temporarily():  # a plan counts what is made under its mode
        layout = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if like.device.type == "cpu":
        if isinstance(like, FakeTensor):
            return FakeTensor(like.fake_mode, layout, like.fake_device)
        if type(like) is Tensor:  # and not one that stands for another
            with suppress(OSError, AttributeError):  # refused, or a system without private mappings
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)
    if layout.is_contiguous():
        return torch.empty((), dtype=dtype, device=like.device).expand(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _storage_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """What a tensor of this layout spans in memory."""
    if not all(shape):
        return 0
    return dtype.itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))
