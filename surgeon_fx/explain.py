"""`explain`: who keeps what alive for backward, and why memory did or did not drop.

What is kept is read off autograd's graph after a forward. Operations of ours leave notes on its nodes, and whatever
runs leaves the layer and the line of source it came from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from surgeon_fx import allocator
from surgeon_fx.api import behind_door, is_transformed, rewrite_of
from surgeon_fx.ops.keep import SMALL_BYTES
from surgeon_fx.ops.rounded import NOTE
from surgeon_fx.ops.slots import NOTES, Note
from surgeon_fx.passes.capture import Break
from surgeon_fx.passes.watch import ORIGIN, Watcher
from surgeon_fx.retained import nodes, own_storages, saved_by, storages
from surgeon_fx.tables import table

MIB = 1 << 20
ATTENTION_KEEPS = "attention keeps q, k, v and its output"
ATTENTION = ("Softmax", "Bmm", "MatMul")  # as they appear in the names of autograd nodes


@dataclass(frozen=True)
class Row:
    """One tensor that backward keeps alive: its size, what is held in its place, and everyone who saves it."""

    layer: str
    operation: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    dense_bytes: int
    held_bytes: int
    handled: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Rows in the order of the forward. Printed, it is a table with the largest first.

    `graphs` are the rewritten graphs that ran; `breaks` say where and why the model left them.
    """

    rows: list[Row]
    transformed: bool
    held_bytes: int
    notes: list[str] = field(default_factory=list)
    graphs: list[GraphModule] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    @property
    def dense_bytes(self) -> int:
        return sum(row.dense_bytes for row in self.rows)

    @property
    def handled_share(self) -> float:
        """Share of the dense bytes that rewritten operations answer for."""
        return sum(row.dense_bytes for row in self.rows if row.handled) / max(self.dense_bytes, 1)

    def table(self, most: int = 20) -> str:
        largest = sorted(self.rows, key=lambda row: (-row.held_bytes, -row.dense_bytes))[:most]
        lines = [
            table(
                [
                    {
                        "layer": row.layer,
                        "saved by": row.operation,
                        "shape": "x".join(map(str, row.shape)),
                        "dtype": row.dtype,
                        "dense MiB": f"{row.dense_bytes / MIB:.2f}",
                        "held MiB": f"{row.held_bytes / MIB:.2f}",
                        "source": row.source,
                        "why": row.reason,
                    }
                    for row in largest
                ],
                headers="keys",
            )
        ]
        if len(self.rows) > len(largest):
            lines.append(f"... and {len(self.rows) - len(largest)} more in .rows")
        ratio = self.held_bytes / max(self.dense_bytes, 1)
        lines.append(
            f"{len(self.rows)} tensors: {self.dense_bytes / MIB:.1f} MiB dense, {self.held_bytes / MIB:.1f} MiB held "
            f"({ratio:.2f}); {100 * self.handled_share:.1f} % of the dense bytes handled"
        )
        if self.transformed:
            lines.append(f"{len(self.graphs)} graphs ran, {len(self.breaks)} breaks: see .graphs and .breaks")
        return "\n".join([*lines, *self.notes])

    def __str__(self) -> str:
        return self.table()


def explain(model: nn.Module, *inputs: Any, **named_inputs: Any) -> Explanation:
    """Runs one forward and reads off what backward would keep alive: of a transformed model, or of any other.

    The forward is a real one: batch-norm statistics move and random numbers are drawn as in any training step.
    """
    model = behind_door(model)
    if not is_transformed(model):
        path: list[str] = []
        with module_path(model, path), Watcher(path):
            outputs = model(*inputs, **named_inputs)
        return explain_outputs(model, outputs, False)
    rewrite = rewrite_of(model)
    path = []
    with observed(model, Watcher(path)):
        rewrite.ran, rewrite.outside = [], []
        try:
            with contextlib.nullcontext() if rewrite.config.capture else module_path(model, path):
                outputs = model(*inputs, **named_inputs)
            captures, outside = list(dict.fromkeys(rewrite.ran)), list(dict.fromkeys(rewrite.outside))
        finally:
            rewrite.ran = rewrite.outside = None
    found = explain_outputs(model, outputs, True)
    found.graphs.extend(capture.graph for capture in captures)
    found.breaks.extend([*(c.broke for c in captures if c.broke is not None), *outside])
    return found


@contextmanager
def observed(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """While a transformed model runs: operations leave notes on autograd's nodes, calls their origin."""
    rewrite = rewrite_of(model)
    before = rewrite.slots.observed, rewrite.watcher
    rewrite.slots.observed, rewrite.watcher = True, watcher
    try:
        yield
    finally:
        rewrite.slots.observed, rewrite.watcher = before


@contextmanager
def module_path(
    model: nn.Module, path: list[str], left: Callable[[str, nn.Module, Any, Any], None] | None = None
) -> Iterator[None]:
    """Keeps the name of the module that runs at the end of `path`; `left` is told of every one that is done."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        path.append(names.get(id(module), path[-1] if path else ""))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        name = path.pop()
        if left is not None:
            left(name, module, inputs, output)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Group:
    """Everyone who saves one tensor."""

    layer: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    dense_bytes: int
    operations: list[str] = field(default_factory=list)
    unhandled: list[str] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    rounded: str = ""  # as Config(exact_saves=...) has it
    rebuilt_from: str = ""  # the layer whose save serves it
    sharers: tuple[str, ...] = ()  # the layers whose inputs are rebuilt from what is held


def explain_outputs(model: nn.Module, outputs: Any, transformed: bool) -> Explanation:
    """What the graph behind outputs holds, given what was noted when it was made."""
    own = own_storages(model, outputs)
    groups: dict[Any, _Group] = {}
    for node in sorted(nodes(outputs), key=lambda n: n._sequence_nr()):
        _add_saves(groups, node, own)
    counted: set[int] = set()
    rows = []
    for group in groups.values():
        held = {k: v for k, v in group.held.items() if k not in counted}
        counted |= held.keys()
        rows.append(_row(group, sum(held.values()), transformed))
    return Explanation(rows, transformed, sum(row.held_bytes for row in rows), _notes(rows, transformed))


def operation_name(node: Node) -> str:
    return re.sub(r"Backward\d*$", "", node.name().removeprefix("torch::autograd::"))


def _add_saves(groups: dict[Any, _Group], node: Any, own: dict[int, int]) -> None:
    name, saved = operation_name(node), saved_by(node)
    layer, source = node.metadata.get(ORIGIN, ("", ""))
    found: list[Note] = node.metadata.get(NOTES, [])
    ours = any(note.place != slice(0, 0) for note in found)  # an operation of ours, not a native one that was noted
    rest = dict(enumerate(saved))

    def add(key: Any, tensors: Sequence[Tensor | None], dense: int, shape: Any, dtype: Any, handled: bool) -> None:
        group = groups.setdefault(key, _Group(layer, source, tuple(shape), str(dtype).removeprefix("torch."), dense))
        group.operations.append(name)
        group.held |= {k: v for k, v in storages(tensors).items() if k not in own}
        if not handled and dense > SMALL_BYTES:
            group.unhandled.append(name)

    for note in found:
        tensors = [rest.pop(i, None) for i in range(len(saved))[note.place]]
        if note.storage in own:
            continue
        apart = note.kind in ("mask", "indices")  # they are kept, and the activation is not
        if note.kind != "mask":
            held = [] if apart else tensors
            add(note.storage, held, note.storage_bytes, note.shape, note.dtype, True)
            group = groups[note.storage]
            group.rebuilt_from = note.source[0] if note.source else group.rebuilt_from
            group.sharers = note.sharers or group.sharers
        if apart:
            add((note.storage, note.kind), tensors, note.beside, note.shape, note.dtype, True)
        if note.kind == "norm":
            statistics = [x for x in rest.values() if x is not None and storages([x]).keys() - own.keys()]
            rest.clear()
            if statistics:
                shape, dtype = statistics[0].shape, statistics[0].dtype
                add((note.storage, id(node)), statistics, note.beside, shape, dtype, True)
    noted = {note.storage for note in found}
    ahead = iter(rest.values())
    for x in ahead:
        if (rounded := getattr(x, NOTE, None)) is not None:
            add(rounded.storage, [x, next(ahead)], rounded.storage_bytes, rounded.shape, rounded.dtype, True)
            groups[rounded.storage].rounded = rounded.kind
            continue
        if x is None or (storage := x.untyped_storage()._cdata) in own:
            continue
        handled = ours or storage in noted or "ScaledDot" in name
        add(storage, [x], x.untyped_storage().nbytes(), x.shape, x.dtype, handled)


def _row(group: _Group, held: int, transformed: bool) -> Row:
    reason = ""
    if not transformed:
        reason = "the model is not transformed"
    elif group.unhandled:
        who = ", ".join(dict.fromkeys(group.unhandled))
        reason = f"{who} needs it exactly"
        if any(name in who for name in ATTENTION):
            reason += " (attention written out: Config(fuse_attention=True) may do without)"
        elif "ToCopy" in who:
            reason = "a copy in another precision, which autocast makes"
    elif group.rebuilt_from:
        reason = f"rebuilt from what {group.rebuilt_from} keeps"
    elif group.sharers:
        reason = f"serves {', '.join(group.sharers)} too"
    elif group.rounded:
        reason = f"not pruned; kept as {group.rounded}"
    elif any("ScaledDot" in name for name in group.operations):
        reason = ATTENTION_KEEPS
    return Row(
        group.layer,
        ", ".join(dict.fromkeys(group.operations)),
        group.source,
        group.shape,
        group.dtype,
        group.dense_bytes,
        held,
        transformed and not group.unhandled,
        reason,
    )


def _notes(rows: list[Row], transformed: bool) -> list[str]:
    notes = [f"malloc: {allocator.describe()}"]
    maps = sum(row.dense_bytes for row in rows if "fuse_attention" in row.reason)
    if maps:
        notes.append(f"{maps / MIB:.1f} MiB are attention written out: try Config(fuse_attention=True)")
    attention = sum(row.held_bytes for row in rows if row.reason == ATTENTION_KEEPS)
    if 10 * attention > sum(row.held_bytes for row in rows):
        notes.append(f"{attention / MIB:.1f} MiB are kept exactly for attention: try Config(exact_saves='int8')")
    if not transformed:
        notes.append("this is what eager keeps: surgeon_fx.transform(model) keeps less")
    return notes
