"""What an operation saves in place of an activation, and how backward gets it back.

Everything goes through `save_for_backward`, so that checkpointing and other people's hooks see it. A pruned activation
is two tensors, values and bitmask. One activation that several operations save is compressed once: a record of what was
kept of its memory lives as long as an autograd node needs it, and whoever comes next shares the tensors in it. If the
next one keeps more, the tensors already saved are pointed at the larger save; if it needs the activation exactly, they
are pointed at the activation itself, which stays alive anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from surgeon_fx.kernels import Compressed, compress, decompress
from surgeon_fx.kernels.layout import FLOAT_BITS, flatten, is_dense, unflatten
from surgeon_fx.ops.slots import Slot, memory_key, note

SMALL_BYTES = 4096  # statistics, masks of a few elements: not worth pruning

Key = tuple[object, ...]


class Record:
    """What is kept of one activation's memory. Holds none of it: whoever saved the tensors does."""

    __slots__ = ("__weakref__", "bitmask", "dense", "ratio", "storage", "values")

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())  # while this lives, no other storage has the same identity
        self.values: weakref.ref[Tensor] | None = None
        self.bitmask: weakref.ref[Tensor] | None = None
        self.ratio = 1.0
        self.dense = False  # an operation keeps it exactly

    def saved(self) -> tuple[Tensor, Tensor] | None:
        """The pruned tensors, if somebody still holds them."""
        values = None if self.values is None else self.values()
        bitmask = None if self.bitmask is None else self.bitmask()
        return None if values is None or bitmask is None else (values, bitmask)


_records: weakref.WeakValueDictionary[Key, Record] = weakref.WeakValueDictionary()


def is_checkpointed() -> bool:
    """Inside a checkpointed region, on its first run or its second: both must save the same, whoever else keeps it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith(("_checkpoint_hook.", "_recomputation_hook."))


def is_prunable(x: Tensor) -> bool:
    return x.nbytes > SMALL_BYTES and x.dtype in FLOAT_BITS


def can_prune(x: Tensor, ratio: float) -> bool:
    return ratio > 0 and is_prunable(x)


class Kept:
    """One operation's view of an activation: what it saves, and the layout to restore."""

    __slots__ = ("activation", "beside", "dense_layout", "instead_of", "record", "saved", "shape", "slot", "stride")

    def __init__(
        self,
        slot: Slot,
        x: Tensor,
        ratio: float,
        instead_of: Tensor | None = None,
        beside: int = 0,
    ) -> None:
        """Keeps `x`, shared with whoever keeps the same memory.

        Where `x` was made of an activation, `instead_of`, it is nobody else's; the native operation would have kept
        the activation, and so many bytes beside it.
        """
        x = x.detach()
        self.slot, self.activation, self.instead_of, self.beside = slot, x, instead_of, beside
        self.shape, self.stride, self.dense_layout = x.shape, x.stride(), is_dense(x)
        self.record: Record | None = None
        self.saved: tuple[Tensor, Tensor | None]
        if not can_prune(x, ratio):
            self.saved = (x, None)
        else:
            self.record = Record(x) if instead_of is not None or is_checkpointed() else _record(x)
            self.saved = _save(self.record, x, ratio)

    def release(self, ctx: Any, place: int) -> tuple[Tensor, Tensor | None]:
        """The tensors for `save_for_backward`; what stays here holds no memory."""
        saved = self.saved
        if self.slot.group.observed:
            x = self.activation if self.instead_of is None else self.instead_of
            kind = "norm" if self.instead_of is not None else "prune" if is_prunable(x) else "exact"
            note(self.slot, ctx, kind, x, slice(place, place + 2), self.beside)
        del self.saved, self.instead_of, self.activation
        return saved

    def restore(self, values: Tensor, bitmask: Tensor | None) -> Tensor:
        refuse_double_backward()
        if bitmask is None:
            return values
        if values.numel() == self.shape.numel():  # pointed at the activation itself, or nothing was dropped
            return unflatten(values, self.shape, self.stride) if self.dense_layout else values.view(self.shape)
        stride = self.stride if self.dense_layout else torch.empty(self.shape, device="meta").stride()
        return decompress(Compressed(values, bitmask, tuple(self.shape), tuple(stride)))


def _record(x: Tensor) -> Record:
    key = memory_key(x)
    found = _records.get(key)
    if found is None:
        found = _records[key] = Record(x)
    return found


def _save(record: Record, x: Tensor, ratio: float) -> tuple[Tensor, Tensor | None]:
    if record.dense:
        return x, None
    before = record.saved()
    if before is not None and ratio >= record.ratio:
        return before
    found = compress(x if is_dense(x) else x.contiguous(), ratio)
    record.ratio = ratio
    if before is not None:
        before[0].data, before[1].data = found.values, found.bitmask
        return before
    record.values, record.bitmask = weakref.ref(found.values), weakref.ref(found.bitmask)
    return found.values, found.bitmask


def keep_exactly(x: Tensor) -> Record | None:
    """Notes that autograd keeps a tensor as it is: whoever prunes the same memory shares it instead.

    The record must live as long as the tensor is kept: put it on the autograd node.
    """
    if not is_prunable(x) or not is_dense(x) or is_checkpointed():
        return None
    record = _record(x)
    if not record.dense:
        record.dense = True
        if (before := record.saved()) is not None:
            before[0].data, before[1].data = flatten(x.detach()), before[1].new_empty(0)
    return record


def without_surroundings(x: Tensor) -> Tensor:
    """A small view of something large is copied, so that the large can go."""
    return x.clone() if x.nbytes <= SMALL_BYTES and x.untyped_storage().nbytes() > 2 * SMALL_BYTES else x


def refuse_double_backward() -> None:
    """Called where activations are restored: they know nothing of their past, and their gradients would be lost."""
    if torch.is_grad_enabled():  # which is what create_graph=True does to a backward
        raise RuntimeError(
            "double backward (create_graph=True) through a pruned activation: its ratio must be 0; "
            "set it with surgeon_fx.ratios(model)"
        )


def save(ctx: Any, kept: Sequence[Kept], *others: Tensor | None) -> None:
    """Saves activations and other tensors through autograd."""
    tensors: list[Tensor | None] = []
    for one in kept:
        tensors += one.release(ctx, len(tensors))
    ctx.kept = tuple(kept)
    ctx.save_for_backward(*tensors, *others)


def restored(ctx: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The activations that `save` was given, and the other tensors."""
    tensors = ctx.saved_tensors
    count = 2 * len(ctx.kept)
    activations = [kept.restore(*tensors[2 * i : 2 * i + 2]) for i, kept in enumerate(ctx.kept)]
    return activations, tensors[count:]
