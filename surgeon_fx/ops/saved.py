"""What autograd holds in place of a saved tensor.

Native operations run as they are, so forward and, at ratio 0, every gradient equal eager to the bit. What changes is
what they save: autograd hands each saved tensor to a pack hook, keeps what the hook returns, and asks for the tensor
again in backward. The classes here are what the hooks return. Each knows what it holds, and how to restore.

An activation that several operations save is kept once (`Activation`): the first to prune it compresses it, the others
share that. If any of them needs it exactly, the dense tensor stays alive whatever the others do, so they use it too and
the compressed copy goes.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from surgeon_fx.kernels import Compressed, compress, decompress, unpack_bits, unpack_value
from surgeon_fx.kernels.layout import FLOAT_BITS, is_dense

Key = tuple[object, ...]


def refuse_double_backward() -> None:
    """Called where pruned values are restored: gradients of those would be silently wrong."""
    if torch.is_grad_enabled():  # which is what create_graph=True does to a backward
        raise RuntimeError(
            "double backward (create_graph=True) through a pruned activation: its ratio must be 0; "
            "set it with surgeon_fx.ratios(model)"
        )


def detached(x: Tensor) -> Tensor:
    """What hooks are given has no graph as a rule; if it has, an output must not hold its own."""
    return x.detach() if x.requires_grad else x


class Saved:
    """Restores one saved tensor; `tensors` are what it holds until then."""

    __slots__ = ("__weakref__",)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def restore(self) -> Tensor:
        raise NotImplementedError


class Activation:
    """The memory of one activation: dense, or pruned."""

    __slots__ = ("__weakref__", "compressed", "dense", "ratio", "storage", "version")

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())  # while this lives, no other storage has the same identity
        self.dense: Tensor | None = None
        self.compressed: Compressed | None = None
        self.ratio = 1.0
        self.version = x._version

    def keep_dense(self, x: Tensor) -> None:
        if self.dense is None:
            self.dense, self.compressed = detached(x), None

    def keep_pruned(self, x: Tensor, ratio: float) -> None:
        if self.dense is None and (self.compressed is None or ratio < self.ratio):
            self.compressed, self.ratio = compress(x, ratio), ratio

    def restore(self) -> Tensor:
        """The elements, in the layout of whoever kept them first."""
        if self.dense is None:
            assert self.compressed is not None
            refuse_double_backward()
            return decompress(self.compressed)
        if self.dense._version != self.version:
            raise RuntimeError(
                "a tensor of shape "
                f"{tuple(self.dense.shape)} that backward needs was changed by an in-place operation after it was saved"
            )
        return self.dense


_activations: weakref.WeakValueDictionary[Key, Activation] = weakref.WeakValueDictionary()


def memory_key(x: Tensor) -> Key:
    """Equal for tensors that share one record: views that cover the same dense block, unchanged in between."""
    layout = () if is_dense(x) else (*x.shape, *x.stride())
    return (x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version, *layout)


def _activation(x: Tensor, key: Key) -> Activation:
    found = _activations.get(key)
    if found is None:
        found = _activations[key] = Activation(x)
    return found


class SavedActivation(Saved):
    """One operation's view of an activation."""

    __slots__ = ("activation", "exact", "key", "shape", "stride")

    def __init__(self, x: Tensor, ratio: float) -> None:
        self.key, self.exact = memory_key(x), not (ratio > 0 and x.dtype in FLOAT_BITS)
        self.shape, self.stride = x.shape, x.stride() if is_dense(x) else None
        self.activation = _activation(x, self.key)
        if self.exact:
            self.activation.keep_dense(x)
        else:
            self.activation.keep_pruned(x, ratio)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        kept = self.activation
        if kept.dense is not None:
            return (kept.dense,)
        assert kept.compressed is not None
        return kept.compressed.values, kept.compressed.bitmask

    def restore(self) -> Tensor:
        found = self.activation.restore()
        if self.stride is None or (found.shape == self.shape and found.stride() == self.stride):
            return found  # a layout with gaps has a record of its own
        return found.as_strided(self.shape, self.stride, found.storage_offset())


class SavedBits(Saved):
    """A tensor of zeros and one other value: one bit per element."""

    __slots__ = ("bits", "shape", "stride", "value")

    def __init__(self, like: Tensor, bits: Tensor, value: Tensor) -> None:
        self.bits, self.value = bits, value
        self.shape, self.stride = like.shape, _dense_stride(like)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bits,)

    def restore(self) -> Tensor:
        if self.value.dtype is torch.bool:
            return unpack_bits(self.bits, self.shape, self.stride)
        return unpack_value(self.bits, self.value, self.shape, self.stride)


class SavedShape(Saved):
    """A tensor of which backward reads the shape alone."""

    __slots__ = ("device", "dtype", "shape", "stride")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def restore(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Window:
    """The windows of a max pool: turns an index into the input plane into a place in the window, and back.

    What is left of an index after the corner of its window is one of few numbers, the same for every window: a byte
    says which.
    """

    def __init__(
        self,
        plane: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.plane, self.stride, self.padding = plane, stride, padding
        self.pitch = [math.prod(plane[d + 1 :]) for d in range(len(plane))]
        places = [[step * dilation[d] * self.pitch[d] for step in range(kernel[d])] for d in range(len(plane))]
        self.places = sorted({sum(place) for place in itertools.product(*places)})

    def fits(self) -> bool:
        return len(self.places) <= 256

    def _corners(self, like: Tensor) -> Tensor:
        """The index of each window's first place, which may lie in the padding; broadcast against the output."""
        dims = len(self.plane)
        corners = torch.zeros([1] * dims, dtype=torch.long, device=like.device)
        for d in range(dims):
            begin = torch.arange(like.shape[d - dims], device=like.device) * self.stride[d] - self.padding[d]
            corners = corners + (begin * self.pitch[d]).view([-1 if i == d else 1 for i in range(dims)])
        return corners

    def offsets(self, indices: Tensor) -> Tensor:
        """One byte per output."""
        numbers = torch.zeros(self.places[-1] + 1, dtype=torch.uint8)
        numbers[self.places] = torch.arange(len(self.places), dtype=torch.uint8)
        return numbers.to(indices.device).take(indices - self._corners(indices))

    def indices(self, offsets: Tensor) -> Tensor:
        places = torch.tensor(self.places, device=offsets.device)
        return places.take(offsets.long()).add_(self._corners(offsets))


class SavedIndices(Saved):
    """Indices of a max pool: one byte for the place in the window, or the narrowest integer that fits the plane."""

    __slots__ = ("narrow", "window")

    def __init__(self, indices: Tensor, plane: Sequence[int], window: Window | None) -> None:
        self.window = window if window is not None and window.fits() else None
        if self.window is not None:
            self.narrow = self.window.offsets(indices)
        else:
            size = math.prod(plane)
            self.narrow = indices.to(torch.uint8 if size <= 1 << 8 else torch.int16 if size <= 1 << 15 else torch.int32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.narrow,)

    def restore(self) -> Tensor:
        return self.narrow.long() if self.window is None else self.window.indices(self.narrow)


def _dense_stride(x: Tensor) -> tuple[int, ...]:
    return (x if is_dense(x) else torch.empty_like(x, device="meta")).stride()
