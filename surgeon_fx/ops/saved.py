"""What autograd holds in place of a saved tensor.

Native operations run as they are, so forward and, at ratio 0, every gradient equal eager to the bit. What changes is
what they save: autograd hands each saved tensor to a pack hook, keeps what the hook returns, and asks for the tensor
again in backward. The classes here are what the hooks return. Each knows what it holds, and how to restore.

An activation that several operations save is kept once (`Activation`): the first to prune it compresses it, the others
share that. If any of them needs it exactly, the dense tensor stays alive whatever the others do, so they use it too and
the compressed copy goes.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from surgeon_fx.kernels import Compressed, compress, decompress, unpack_bits
from surgeon_fx.kernels.layout import FLOAT_BITS, is_dense

Key = tuple[object, ...]


_live: weakref.WeakSet[Saved] = weakref.WeakSet()


def held_bytes() -> int:
    """Bytes that rewritten operations hold for backward now: unique storages, masks and statistics and all.

    Parameters that backward needs are not counted: they live anyway.
    """
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for saved in list(_live)
        for tensor in saved.tensors
        if not saved.lives_anyway
    }
    return sum(storages.values())


class Saved:
    """Restores one saved tensor; `tensors` are what it holds until then."""

    __slots__ = ("__weakref__", "lives_anyway")

    def __init__(self) -> None:
        self.lives_anyway = False
        _live.add(self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def restore(self) -> Tensor:
        raise NotImplementedError


class Activation:
    """The memory of one activation: dense, or pruned."""

    __slots__ = ("__weakref__", "compressed", "dense", "storage", "version")

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())  # while this lives, no other storage has the same identity
        self.dense: Tensor | None = None
        self.compressed: Compressed | None = None
        self.version = x._version

    def keep_dense(self, x: Tensor) -> None:
        self.dense, self.compressed = x.detach(), None  # detached: an output must not hold its own graph

    def keep_pruned(self, x: Tensor, ratio: float) -> None:
        if self.dense is None and (self.compressed is None or ratio < self._ratio):
            self.compressed = compress(x, ratio)

    @property
    def _ratio(self) -> float:
        assert self.compressed is not None
        return 1 - self.compressed.kept / max(self.compressed.numel, 1)

    def restore(self) -> Tensor:
        """The elements, in the layout of whoever kept them first."""
        if self.dense is None:
            assert self.compressed is not None
            return decompress(self.compressed)
        if self.dense._version != self.version:
            raise RuntimeError(
                "a tensor of shape "
                f"{tuple(self.dense.shape)} that backward needs was changed by an in-place operation after it was saved"
            )
        return self.dense


_activations: weakref.WeakValueDictionary[Key, Activation] = weakref.WeakValueDictionary()


def _activation(x: Tensor) -> Activation:
    """The record of this memory. Views that cover the same dense block share one."""
    layout = () if is_dense(x) else (*x.shape, *x.stride())
    key = (x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version, *layout)
    found = _activations.get(key)
    if found is None:
        found = _activations[key] = Activation(x)
    return found


class SavedActivation(Saved):
    """One operation's view of an activation."""

    __slots__ = ("activation", "shape", "stride")

    def __init__(self, x: Tensor, ratio: float) -> None:
        super().__init__()
        self.shape, self.stride = x.shape, x.stride() if is_dense(x) else None
        self.activation = _activation(x)
        if ratio > 0 and x.dtype in FLOAT_BITS:
            self.activation.keep_pruned(x, ratio)
        else:
            self.activation.keep_dense(x)

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
    """A tensor of two values: one bit per element."""

    __slots__ = ("bits", "dtype", "off", "on", "shape", "stride")

    def __init__(self, like: Tensor, bits: Tensor, off: float, on: float) -> None:
        super().__init__()
        self.bits, self.off, self.on = bits, off, on
        dense = like if is_dense(like) else torch.empty_like(like, device="meta")
        self.shape, self.stride, self.dtype = like.shape, dense.stride(), like.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bits,)

    def restore(self) -> Tensor:
        values = unpack_bits(self.bits, self.shape, self.stride).to(self.dtype)
        if (self.off, self.on) != (0, 1):
            values.mul_(self.on - self.off).add_(self.off)
        return values


class SavedShape(Saved):
    """A tensor of which backward reads the shape alone."""

    __slots__ = ("device", "dtype", "shape", "stride")

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.shape, self.stride, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def restore(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
