"""Which layer an operation belongs to, and the ratio it runs at.

A rewritten operation is given the key of its layer, a string such as "3:layer1.0.conv1": the number of the transformed
model and the layer's name. The ratio behind a key is looked up when the operation runs, so changing the table changes
no graph. An operation without weights follows the layer whose output it reads. A graph knows that layer; where no graph
does, the key has an empty name and the layer is found by walking back along autograd's own graph, in which every
operation of ours leaves its key.
"""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from surgeon_fx.kernels.layout import is_dense
from surgeon_fx.ratio_table import RatioTable, shared_ratio

MARK = "surgeon_fx"  # in the metadata of an autograd node: the key of the layer that made it
NOTES = "surgeon_fx_notes"  # likewise: what the node keeps, noted while somebody looks on


@dataclass(frozen=True)
class Note:
    """What an operation keeps of one activation."""

    layer: str
    kind: str  # "prune" and "norm" depend on the ratio; "exact", "bits", "mask", "indices", "int8", "bf16" do not
    storage: int  # of the activation
    storage_bytes: int
    key: tuple[object, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: slice  # among the tensors that the node saved; empty if they are the native operation's
    beside: int  # bytes that the native operation keeps beside the activation, where ours keeps something else
    alive: StorageWeakRef  # so that no later storage takes the same identity
    sharers: tuple[str, ...] = ()  # other layers that are served by what is kept
    source: tuple[str, ...] = ()  # the layer whose save the activation is rebuilt from, and those that share it
    places: tuple[str, ...] = ()  # likewise, of the save at whose places the activation is kept where as many are

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def make_note(
    slot: Slot,
    kind: str,
    x: Tensor,
    place: slice = slice(0, 0),
    beside: int = 0,
    source: tuple[str, ...] = (),
    places: tuple[str, ...] = (),
) -> Note:
    storage = x.untyped_storage()
    return Note(
        slot.name,
        kind,
        storage._cdata,
        storage.nbytes(),
        memory_key(x),
        tuple(x.shape),
        x.dtype,
        place,
        beside,
        StorageWeakRef(storage),
        slot.sharers,
        source,
        places,
    )


def note(slot: Slot, node: Any, *about: Any, **more: Any) -> None:
    """Notes on an autograd node what it keeps of an activation. Call it where `slot.group.observed` is set."""
    node.metadata.setdefault(NOTES, []).append(make_note(slot, *about, **more))


def memory_key(x: Tensor) -> tuple[object, ...]:
    """Equal for tensors that share what is kept of them: views of the same dense block, unchanged in between."""
    layout = () if is_dense(x) else (*x.shape, *x.stride())
    return (x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version, *layout)


_numbers = itertools.count(1)
_slots: weakref.WeakValueDictionary[str, Slot] = weakref.WeakValueDictionary()


class Slot:
    """A layer as operations see it."""

    __slots__ = ("__weakref__", "elements", "group", "key", "name")

    offers = False  # whether what it keeps serves others
    sharers: tuple[str, ...] = ()  # the layers among them

    def __init__(self, group: Slots, name: str) -> None:
        self.group, self.name, self.key = group, name, f"{group.number}:{name}"
        self.elements = 0  # of the layer's inputs, over all its calls

    @property
    def is_layer(self) -> bool:
        """Whether it has a row in the table. The empty name is a layer's if the whole model is one."""
        return bool(self.name) or "" in self.group.table

    @property
    def ratio(self) -> float:
        return self.group.table[self.name] if self.is_layer else self.group.default


class SharingSlot(Slot):
    """A layer at a place where what it keeps serves others as well: all that the most demanding of them wants is kept.

    Known by a key of its own; what it says of itself is what the layer says.
    """

    __slots__ = ("layer", "sharers")

    offers = True

    def __init__(self, layer: Slot, sharers: tuple[str, ...]) -> None:
        self.layer, self.sharers = layer, sharers
        super().__init__(layer.group, layer.name)

    @property
    def elements(self) -> int:
        return self.layer.elements

    @elements.setter
    def elements(self, count: int) -> None:
        if count:
            self.layer.elements = count

    @property
    def ratio(self) -> float:
        if not self.is_layer:
            return self.group.default
        return shared_ratio(self.group.table, self.name, self.sharers)


class Slots:
    """The layers of one transformed model, by name; the empty name stands for no layer, unless the model is one."""

    def __init__(self, table: RatioTable, exact_saves: str | None = None) -> None:
        self.table, self.number = table, next(_numbers)
        self.exact_saves = exact_saves  # how what may not be pruned is rounded, as in `Config`
        self.default = 0.0  # the ratio of what belongs to no layer
        self.gathers = False  # weights are only there while their layer runs
        self.observed = False  # somebody looks on: operations leave notes on autograd's nodes
        self.by_name = {name: Slot(self, name) for name in ("", *table)}
        self.sharing: dict[str, SharingSlot] = {}  # by their own keys
        _slots.update({slot.key: slot for slot in self.by_name.values()})

    def key(self, name: str) -> str:
        return self.by_name[name].key

    def count_elements(self) -> None:
        """Starts to count the elements of each layer's inputs from zero."""
        for slot in self.by_name.values():
            slot.elements = 0

    def elements(self) -> dict[str, int]:
        """Elements of each layer's inputs, over all its calls since the count began."""
        return {name: slot.elements for name, slot in self.by_name.items() if slot.is_layer and slot.elements}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        table = RatioTable(self.table)
        table.update(self.table)
        memo[id(self)] = new = Slots(table, self.exact_saves)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (dict(self.table), self.exact_saves)


def _unpickled(ratios: dict[str, float], exact_saves: str | None = None) -> Slots:
    table = RatioTable(ratios)
    table.update(ratios)
    return Slots(table, exact_saves)


def find_slot(key: str, x: Tensor) -> Slot:
    """The slot behind a key; if it is no layer's, that of the layer whose output `x` is."""
    slot = _slots[key]
    if not slot.is_layer and (found := producer(x)) is not None:
        slot = _slots.get(found, slot)
    return slot


def sharing_key(key: str, sharers: tuple[str, ...]) -> str:
    """The key of a layer where what it keeps serves these layers too."""
    layer = _slots[key]
    own = f"{key} for {', '.join(sharers)}"
    if own not in layer.group.sharing:
        _slots[own] = layer.group.sharing[own] = SharingSlot(layer, sharers)
    return own


def slot_behind(key: str) -> Slot:
    return _slots[key]


def ratio_behind(key: str) -> float:
    return _slots[key].ratio


def find_key(key: str, otherwise: str) -> str:
    return key if key in _slots else otherwise


def mark(output: Any, slot: Slot) -> Any:
    """Leaves the key of a layer on the autograd node of its output."""
    x = output[0] if isinstance(output, tuple) else output
    if (node := x.grad_fn) is not None:
        node.metadata[MARK] = slot.key
    return output


def producer(x: Tensor) -> str | None:
    """The key of the layer that a tensor comes from: depth first, along first inputs, to the nearest mark."""
    ahead: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if (key := node.metadata.get(MARK)) is not None:
            return key
        seen.add(node)
        ahead.extend(following for following, _ in reversed(node.next_functions))
    return None
