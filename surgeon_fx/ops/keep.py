"""What an operation saves in place of an activation, and how backward gets it back.

Everything goes through `save_for_backward`, so that checkpointing and other people's hooks see it. A pruned activation
is two tensors, values and bitmask. One activation that several operations save is compressed once: a record of what was
kept of its memory lives as long as an autograd node needs it, and whoever comes next in the same forward shares the
tensors in it: a later forward may find other data in that memory, and another model has ratios of its own. If the next
one keeps more, the tensors already saved are pointed at the larger save; if it needs the activation exactly, they
are pointed at the activation itself, which stays alive anyway. What may not be pruned but may be rounded
(`Config(exact_saves=...)`) is two tensors too: codes and scales, or a copy in bfloat16 and nothing; pruned saves of the
same activation are pointed at those.

An activation that was computed from another by element, a norm's output from its normalised input, may be rebuilt from
what is kept of that (`Share`): then nothing is kept of it. One that was added to others since is no longer known from
that; it is kept at the same places (`Record.places`), so that one bitmask serves both.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from surgeon_fx.kernels import Compressed, compress, decompress, dequantize, pick, quantize, quantized_bytes, rescale
from surgeon_fx.kernels.layout import FLOAT_BITS, flatten, is_dense, kept_count, unflatten
from surgeon_fx.ops.slots import Slot, memory_key, note

SMALL_BYTES = 4096  # statistics, masks of a few elements: not worth pruning

Key = tuple[object, ...]
Prune = Callable[[Tensor, float], Compressed]


class Record:
    """What is kept of one activation's memory. Holds none of it: whoever saved the tensors does."""

    __slots__ = ("__weakref__", "bitmask", "dense", "places", "ratio", "rounding", "share", "storage", "values")

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())  # while this lives, no other storage has the same identity
        self.values: weakref.ref[Tensor] | None = None
        self.bitmask: weakref.ref[Tensor] | None = None
        self.ratio = 1.0
        self.rounding: str | None = None  # an operation keeps all of it, rounded so
        self.dense = False  # an operation keeps it exactly
        self.share: Share | None = None  # what it can be rebuilt from
        self.places: Share | None = None  # what is kept of another in the same memory order, whose places will do

    def saved(self) -> tuple[Tensor, Tensor] | None:
        """The tensors that are kept, if somebody still holds them."""
        values = None if self.values is None else self.values()
        bitmask = None if self.bitmask is None else self.bitmask()
        return None if values is None or bitmask is None else (values, bitmask)

    def pruned(self, x: Tensor, ratio: float, prune: Prune) -> tuple[Tensor, Tensor]:
        """Values and bitmask of the activation; at the places of another where as many are kept of that."""
        places = None if self.places is None else self.places.saved()
        if places is not None and (bitmask := places[1]) is not None and bitmask.numel():
            values, kept = places[0], kept_count(x.numel(), ratio)
            if values is not None and values.numel() == kept < x.numel():
                return pick(x, bitmask, kept), bitmask.detach()  # not the same tensor: either may be pointed elsewhere
        found = prune(x, ratio)
        return found.values, found.bitmask

    def shared(self, ratio: float) -> Share | None:
        """What it can be rebuilt from, where that keeps at least as much as the ratio wants."""
        share = self.share
        return share if share is not None and share.ratio <= ratio and share.saved() is not None else None


@dataclass(frozen=True)
class Share:
    """How an activation is rebuilt from what is kept of another, in the same memory order and at the kept places.

    A scale and a shift by channel, element i being of channel `i // run % channels`; then functions of each element.
    """

    first: weakref.ref[Tensor]  # what is kept: values, codes, or the activation itself
    second: weakref.ref[Tensor] | None
    dtype: torch.dtype
    numel: int
    ratio: float
    source: tuple[str, ...]  # the layer that keeps it, and those that share it
    run: int = 1
    weight: Tensor | None = None
    bias: Tensor | None = None
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()

    def saved(self) -> tuple[Tensor | None, ...] | None:
        """The tensors to save, if what it is rebuilt from is still held."""
        first, second = self.first(), None if self.second is None else self.second()
        if first is None or (self.second is not None and second is None):
            return None
        return first, second, self.weight, self.bias

    def rebuild(
        self, first: Tensor, second: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Values and bitmask of the activation."""
        if second is None:
            values, bitmask = flatten(first), torch.empty(0, dtype=torch.uint8, device=first.device)
        elif first.numel() == self.numel:
            values, bitmask = unround(first, second, self.dtype), second.new_empty(0, dtype=torch.uint8)
        else:
            values, bitmask = first, second
        values = rescale(values, bitmask, self.numel, self.run, weight, bias)  # a copy: functions may work in place
        for function in self.functions:
            values = function(values)
        return values, bitmask


_records: weakref.WeakValueDictionary[Key, Record] = weakref.WeakValueDictionary()


class _Current(threading.local):
    forward = 0  # the number of the one that runs in this thread


_current, _forwards = _Current(), itertools.count(1)


@contextmanager
def one_forward() -> Iterator[None]:
    """What is kept in here is shared in here alone. Inside another it is part of that one."""
    if _current.forward:
        yield
        return
    _current.forward = next(_forwards)
    try:
        yield
    finally:
        _current.forward = 0


def _key(x: Tensor) -> Key:
    return _current.forward, *memory_key(x)


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

    __slots__ = (
        "activation",
        "beside",
        "dense_layout",
        "dtype",
        "instead_of",
        "record",
        "saved",
        "shape",
        "share",
        "slot",
        "stride",
    )

    def __init__(
        self,
        slot: Slot,
        x: Tensor,
        ratio: float,
        instead_of: Tensor | None = None,
        beside: int = 0,
        cast_of: Tensor | None = None,
        prune: Prune = compress,
    ) -> None:
        """Keeps `x`, shared with whoever keeps the same memory.

        Where `x` was made of an activation, `instead_of`, it is nobody else's; the native operation would have kept
        the activation, and so many bytes beside it. `cast_of` is what `x` may be in another precision. `prune` may keep
        what it computes of `x`, in the same memory order; then `x` is the activation.
        """
        x = x.detach()
        self.slot, self.activation, self.instead_of, self.beside = slot, x, instead_of, beside
        self.shape, self.stride, self.dense_layout, self.dtype = x.shape, x.stride(), is_dense(x), x.dtype
        self.record: Record | None = None
        self.share: Share | None = None
        self.saved: tuple[Tensor | None, ...]
        if not can_prune(x, ratio):
            self.saved = (x, None)
            return
        alone = instead_of is not None or is_checkpointed()
        self.record = Record(x) if alone else _record(x)
        if not alone and self.record.saved() is None and not self.record.dense:
            self.share = self.record.shared(ratio)
            if self.share is None and cast_of is not None and cast_of.dtype is not x.dtype:
                self.share = find_share(cast_of, ratio)
        self.saved = _save(self.record, x, ratio, prune) if self.share is None else self.share.saved() or ()

    @property
    def count(self) -> int:
        """How many tensors it saves."""
        return 2 if self.share is None else 4

    def release(self, ctx: Any, place: int) -> tuple[Tensor | None, ...]:
        """The tensors for `save_for_backward`; what stays here holds no memory."""
        saved = self.saved
        if self.slot.group.observed:
            x = self.activation if self.instead_of is None else self.instead_of
            kind = "norm" if self.instead_of is not None else "prune" if is_prunable(x) else "exact"
            source = () if self.share is None else self.share.source
            places = None if self.share is not None or self.record is None else self.record.places
            places_of = () if places is None else places.source
            note(self.slot, ctx, kind, x, slice(place, place + self.count), self.beside, source, places_of)
        del self.saved, self.instead_of, self.activation
        return saved

    @property
    def restored_stride(self) -> tuple[int, ...]:
        if self.dense_layout:
            return tuple(self.stride)
        return torch.empty(self.shape, device="meta").stride()

    def packed(self, *tensors: Any) -> tuple[Tensor, Tensor] | None:
        """Values and bitmask, in the layout of `restored_stride`; None where the activation is whole.

        `tensors` are those that were saved.
        """
        values, bitmask = self._parts(tensors)
        return None if self._is_whole(values, bitmask) else (values.to(self.dtype), bitmask)

    def restore(self, *tensors: Any) -> Tensor:
        """The dense activation, zero where it was dropped."""
        values, bitmask = self._parts(tensors)
        if bitmask is None:
            return values
        if not self._is_whole(values, bitmask):
            return decompress(Compressed(values.to(self.dtype), bitmask, tuple(self.shape), self.restored_stride))
        # rounded, pointed at the activation itself, or nothing was dropped
        return unflatten(unround(values, bitmask, self.dtype), self.shape, self.restored_stride)

    def _parts(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        refuse_double_backward()
        return tensors if self.share is None else self.share.rebuild(*tensors)

    def _is_whole(self, values: Tensor, bitmask: Tensor | None) -> bool:
        return bitmask is None or values.numel() == self.shape.numel()


SHARES = "surgeon_fx_shares"  # in the metadata of an autograd node: records of what can be rebuilt from what it keeps


def offer(output: Tensor, share: Share) -> None:
    """Has whoever prunes an activation rebuild it from what is kept of another, for as long as its node lives."""
    if (record := _lasting_record(output)) is not None:
        record.share = share


def offer_places(output: Tensor, share: Share) -> None:
    """Has whoever prunes an activation keep it at the places where another is kept, for as long as its node lives."""
    if (record := _lasting_record(output)) is not None:
        record.places = share


def _lasting_record(output: Tensor) -> Record | None:
    node: Any = output.grad_fn
    if node is None or is_checkpointed():
        return None
    record = _record(output)
    node.metadata.setdefault(SHARES, []).append(record)
    return record


def find_places(x: Tensor) -> Share | None:
    """The other activation at whose places this one may be kept."""
    record = _records.get(_key(x))
    return None if record is None else record.places


def find_share(x: Tensor, ratio: float = 1.0) -> Share | None:
    """What an activation can be rebuilt from, where that keeps at least as much as the ratio wants."""
    record = _records.get(_key(x))
    return None if record is None else record.shared(ratio)


def _record(x: Tensor) -> Record:
    key = _key(x)
    found = _records.get(key)
    if found is None:
        found = _records[key] = Record(x)
    return found


def _save(record: Record, x: Tensor, ratio: float, prune: Prune) -> tuple[Tensor, Tensor | None]:
    if record.dense:
        return x, None
    before = record.saved()
    if before is not None and (record.rounding is not None or ratio >= record.ratio):
        return before
    found = record.pruned(x if is_dense(x) else x.contiguous(), ratio, prune)
    record.ratio, record.rounding = ratio, None
    return _replace(record, before, *found)


def _replace(record: Record, before: tuple[Tensor, Tensor] | None, first: Tensor, second: Tensor) -> Any:
    """Points the tensors that are kept, if there are any, at others."""
    if before is not None:
        before[0].data, before[1].data = first, second
        return before
    record.values, record.bitmask = weakref.ref(first), weakref.ref(second)
    return first, second


ROUNDINGS = ("int8", "bf16")  # of `Config(exact_saves=...)`, the more exact one last


def can_round(x: Tensor, rounding: str) -> bool:
    """Whether an activation is smaller when it is rounded."""
    return is_prunable(x) and (rounding == "int8" or x.element_size() > 2)


def rounded_bytes(numel: int, dtype: torch.dtype, rounding: str) -> int:
    return quantized_bytes(numel, dtype) if rounding == "int8" else 2 * numel


def round_save(x: Tensor, rounding: str) -> tuple[Tensor, Tensor, Record]:
    """Keeps all of `x`, rounded, shared with whoever keeps the same memory.

    The record must live as long as the tensors.
    """
    x = x.detach()
    record = Record(x) if is_checkpointed() else _record(x)
    if record.dense:
        return x, x.new_empty(0), record
    before = record.saved()
    if before is not None and record.rounding in (rounding, ROUNDINGS[-1]):
        return *before, record
    flat = flatten(x if is_dense(x) else x.contiguous())
    first, second = quantize(flat) if rounding == "int8" else (flat.to(torch.bfloat16), flat.new_empty(0))
    record.rounding = rounding
    return *_replace(record, before, first, second), record


def unround(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements behind what `round_save` keeps; as they are where they were not rounded."""
    return dequantize(first, second, dtype) if first.dtype is torch.int8 else first.to(dtype)


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
            _replace(record, before, flatten(x.detach()), before[1].new_empty(0))
    return record


def without_surroundings(x: Tensor) -> Tensor:
    """A small view of something large is copied, so that the large can go."""
    return x.clone() if x.nbytes <= SMALL_BYTES and x.untyped_storage().nbytes() > 2 * SMALL_BYTES else x


def refuse_double_backward() -> None:
    """Called where activations are restored: they know nothing of their past, and their gradients would be lost."""
    if torch.is_grad_enabled():  # which is what create_graph=True does to a backward
        raise RuntimeError(
            "double backward (create_graph=True) through a pruned or rounded activation: its ratio must be 0, set it "
            "with surgeon_fx.ratios(model), and Config(exact_saves=None)"
        )


def save(ctx: Any, kept: Sequence[Kept], *others: Tensor | None) -> None:
    """Saves activations and other tensors through autograd."""
    tensors: list[Tensor | None] = []
    for one in kept:
        tensors += one.release(ctx, len(tensors))
    ctx.kept = tuple(kept)
    ctx.save_for_backward(*tensors, *others)


def restored(ctx: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The activations that `save` was given, dense, and the other tensors."""
    ahead = iter(ctx.saved_tensors)
    activations = [kept.restore(*itertools.islice(ahead, kept.count)) for kept in ctx.kept]
    return activations, tuple(ahead)
