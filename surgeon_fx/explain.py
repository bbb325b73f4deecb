"""`explain`: who keeps what alive for backward, and why memory did or did not drop."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from surgeon_fx import allocator, kernels, passes
from surgeon_fx.api import MARK
from surgeon_fx.ops.policies import SMALL_BYTES, AsEager, Policy, storage_of
from surgeon_fx.ops.runtime import hooks, state
from surgeon_fx.ops.saved import Saved
from surgeon_fx.passes.graph import SOURCE
from surgeon_fx.retained import nodes, saved_by, storages

MIB = 1 << 20
NOT_USERS = tuple(
    f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, allocator, kernels, passes)
)  # where the source line of a save is not looked for
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
    """Rows in the order of the forward. Printed, it is a table with the largest first."""

    rows: list[Row]
    transformed: bool
    held_bytes: int
    notes: list[str] = field(default_factory=list)

    @property
    def dense_bytes(self) -> int:
        return sum(row.dense_bytes for row in self.rows)

    @property
    def handled_share(self) -> float:
        """Share of the dense bytes that rewritten operations answer for."""
        return sum(row.dense_bytes for row in self.rows if row.handled) / max(self.dense_bytes, 1)

    def table(self, most: int = 20) -> str:
        from tabulate import tabulate

        largest = sorted(self.rows, key=lambda row: (-row.held_bytes, -row.dense_bytes))[:most]
        lines = [
            tabulate(
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
                disable_numparse=True,
            )
        ]
        if len(self.rows) > len(largest):
            lines.append(f"... and {len(self.rows) - len(largest)} more in .rows")
        ratio = self.held_bytes / max(self.dense_bytes, 1)
        lines.append(
            f"{len(self.rows)} tensors: {self.dense_bytes / MIB:.1f} MiB dense, {self.held_bytes / MIB:.1f} MiB held "
            f"({ratio:.2f}); {100 * self.handled_share:.1f} % of the dense bytes handled"
        )
        return "\n".join([*lines, *self.notes])

    def __str__(self) -> str:
        return self.table()


@dataclass
class _Save:
    """One saving of one tensor."""

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    source: str
    handled: bool
    owner: str | None
    numel: int
    itemsize: int
    saved: Saved
    alive: StorageWeakRef  # so that no later storage takes the same identity


def explain(model: nn.Module, *inputs: Any, **named_inputs: Any) -> Explanation:
    """Runs one forward and reads off what backward would keep alive: of a transformed model, or of any other.

    The forward is a real one: batch-norm statistics move and random numbers are drawn as in any training step.
    """
    path: list[str] = []
    with module_path(model, path), observed(path) as saves:
        outputs = model(*inputs, **named_inputs)
    return explain_outputs(model, outputs, saves, MARK in model.__dict__)


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


@contextmanager
def observed(path: Sequence[str]) -> Iterator[list[_Save]]:
    """Notes every tensor that autograd saves meanwhile, with the layer and the line of source it happened in."""
    saves: list[_Save] = []

    def observe(policy: Policy, x: Tensor, saved: Saved) -> None:
        storage = x.untyped_storage()
        saves.append(
            _Save(
                storage._cdata,
                storage.nbytes(),
                tuple(x.shape),
                str(x.dtype).removeprefix("torch."),
                path[-1] if path else "",
                _source(sys._getframe(1)),
                policy.handles,
                policy.owner,
                x.numel(),
                x.element_size(),
                saved,
                StorageWeakRef(storage),
            )
        )

    before, state.observer = state.observer, observe
    try:
        with saved_tensors_hooks(*hooks(AsEager(0.0))):
            yield saves
    finally:
        state.observer = before


def explain_outputs(model: nn.Module, outputs: Any, saves: list[_Save], transformed: bool) -> Explanation:
    """What the graph behind outputs holds, given what was noted when it was made."""
    own = storages((*model.parameters(), *model.buffers()))
    operations: dict[int, str] = {}
    loose: list[tuple[str, Tensor]] = []
    for node in nodes(outputs):
        name = re.sub(r"Backward\d*$", "", node.name().removeprefix("torch::autograd::"))
        for one in saved_by(node):
            if isinstance(one, Saved):
                operations[id(one)] = name
            else:
                loose.append((name, one))
    kept = [save for save in saves if id(save.saved) in operations and save.storage not in own]
    groups: dict[int, list[_Save]] = {}
    for save in kept:
        groups.setdefault(save.storage, []).append(save)
    counted: set[int] = set()
    rows = []
    for group in groups.values():
        held = {k: v for k, v in storages(save.saved for save in group).items() if k not in own and k not in counted}
        counted |= held.keys()
        rows.append(_row(group, operations, sum(held.values()), transformed))
    for name, x in loose:
        storage = storage_of(x)
        if storage not in own and storage not in counted:
            counted.add(storage)
            size = x.untyped_storage().nbytes()
            why = f"kept by {name} outside of autograd's hooks"
            rows.append(Row("", name, "", tuple(x.shape), str(x.dtype)[6:], size, size, False, why))
    held_bytes = sum(row.held_bytes for row in rows)
    return Explanation(rows, transformed, held_bytes, _notes(rows, transformed))


def _row(group: list[_Save], operations: dict[int, str], held: int, transformed: bool) -> Row:
    unhandled = [save for save in group if not save.handled and save.bytes > SMALL_BYTES]
    first = group[0]
    reason = ""
    if not transformed:
        reason = "the model is not transformed"
    elif unhandled:
        who = ", ".join(dict.fromkeys(operations[id(save.saved)] for save in unhandled))
        reason = f"{who} needs it exactly"
        if any(name in who for name in ATTENTION):
            reason += " (attention written out: Config(fuse_attention=True) may do without)"
    elif any("ScaledDot" in operations[id(save.saved)] for save in group):
        reason = "attention keeps q, k, v and its output"
    return Row(
        first.layer,
        ", ".join(dict.fromkeys(operations[id(save.saved)] for save in group)),
        first.source,
        first.shape,
        first.dtype,
        first.bytes,
        held,
        transformed and not unhandled,
        reason,
    )


def _notes(rows: list[Row], transformed: bool) -> list[str]:
    notes = [f"malloc: {allocator.describe()}"]
    maps = sum(row.dense_bytes for row in rows if "fuse_attention" in row.reason)
    if maps:
        notes.append(f"{maps / MIB:.1f} MiB are attention written out: try Config(fuse_attention=True)")
    if not transformed:
        notes.append("this is what eager keeps: surgeon_fx.transform(model) keeps less")
    return notes


def _source(frame: FrameType | None) -> str:
    """The nearest line of Python outside torch and this package, through generated graph code to what it stands for."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<eval_with_key>"):
            if line := _traced_line(frame):
                return line
        elif not file.startswith(NOT_USERS):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _traced_line(frame: FrameType) -> str:
    """Where the graph node that generated code is at was written."""
    outer = frame.f_back
    graph = outer.f_locals.get("graph") if outer is not None else None
    if not isinstance(graph, torch.fx.GraphModule):
        return ""
    begin = frame.f_code.co_firstlineno
    index = graph._lineno_map.get(frame.f_lineno - begin) if graph._lineno_map else None
    found = list(graph.graph.nodes)
    file, line = found[index].meta.get(SOURCE, ("", 0)) if index is not None and index < len(found) else ("", 0)
    return f"{Path(file).name}:{line}" if file else ""
