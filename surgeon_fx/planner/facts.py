"""Facts about one training step, found without running it: the program itself, on tensors that have no memory.

A twin of the model, over fake parameters, goes through forward and backward. Everything the real step would do is done,
by the same code, except the arithmetic: hooks decide what is kept, storages are born and die. So what is counted here
is what is counted there.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves, tree_map_only

from surgeon_fx.api import is_transformed, rewrite_of
from surgeon_fx.explain import Row, Watcher, explain_outputs, module_path, observed
from surgeon_fx.inputs import first_tensor
from surgeon_fx.kernels.backends import FAKES
from surgeon_fx.modules import Trains, is_layer, is_norm_layer, trains
from surgeon_fx.ops.slots import NOTES
from surgeon_fx.planner.arithmetic import LayerInput, Saving
from surgeon_fx.retained import nodes, saved_by, storages


@dataclass
class Facts:
    """What one step does to memory."""

    rows: list[Row]
    saved_bytes: int
    layers: list[LayerInput]
    savings: list[Saving]
    timeline: list[tuple[str, int]] = field(default_factory=list)  # live bytes after each operation, and where
    forward_operations: int = 0

    @property
    def peak_bytes(self) -> int:
        return max((live for _, live in self.timeline), default=0)


class Program(FakeTensorMode):
    """Runs operations on tensors without memory, and follows every storage they create from birth to death."""

    def __init__(self, path: Sequence[str]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.path, self.live, self.inside, self.counting = path, 0, False, False
        self.timeline: list[tuple[str, int]] = []
        self.known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE or self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.inside = True  # what an operation is made of here says nothing about what it takes there
        try:
            result = self._shortcut(func, args, kwargs or {})
            if result is None:
                result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.inside = False
        born = False
        for x in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if self.counting and isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self.known:
                self.known[storage] = None
                size, born = storage.nbytes(), True
                self.live += size
                weakref.finalize(storage, self._died, size)
        if born:
            self.timeline.append((self.path[-1] if self.path else "", self.live))
        return result

    def _shortcut(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Aliases and our own operations are most of the calls, and need none of what the mode does for others."""
        if not args or not isinstance(args[0], FakeTensor):
            return None
        device = args[0].fake_device
        if func in IN_PLACE:
            return args[0]
        if func in VIEWS:
            with in_kernel_invocation_manager(self):
                alias = func(*args, **kwargs)
            return FakeTensor(self, alias, device)
        if func in FAKES:
            made = FAKES[func](*(_meta(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
            return tree_map_only(Tensor, lambda x: FakeTensor(self, x, device), made)
        return None

    def _died(self, size: int) -> None:
        self.live -= size

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Those were there before."""
        for x in tensors:
            self.known[x.untyped_storage()] = None


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
IN_PLACE = {aten.add_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.sub_.Tensor, aten.relu_.default}
VIEWS = {
    *(aten.detach.default, aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.select.int, aten.unsqueeze.default, aten.expand.default, aten.as_strided.default, aten.slice.Tensor),
}


def twin(model: nn.Module, fake: FakeTensorMode, which: Trains, device: str) -> nn.Module:
    """The model over fake tensors: same structure, same ratios, no memory."""
    chosen = trains(model, which)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        like = _fake(parameter, fake, device)
        memo[id(parameter)] = new = nn.Parameter(like, requires_grad=chosen(name, parameter))
        new.grad = like if new.requires_grad else None  # already there, as after a first step
    memo |= {id(buffer): _fake(buffer, fake, device) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _fake(x: Tensor, fake: FakeTensorMode, device: str) -> Tensor:
    """Built from its parts: the same as `torch.empty_like` in the mode, for a third of the time."""
    return FakeTensor(fake, _meta(x), _device(x, device))


def _device(x: Tensor, device: str) -> torch.device:
    return torch.device(device) if x.device.type == "meta" else x.device


def step(
    model: nn.Module,
    inputs: Sequence[Any],
    named_inputs: Mapping[str, Any],
    ratios: Mapping[str, float] | float | None = None,
    train: Trains = None,
    backward: bool = True,
    device: str = "cpu",
) -> Facts:
    """The facts of one step. Inputs may be tensors of any device, fake ones, or shapes."""
    path: list[str] = []
    fake = Program(path)
    copied = twin(model, fake, train, device)
    if ratios is not None:
        set_ratios(copied, ratios)
    with fake:
        inputs, named_inputs = (_fake_inputs(value, device) for value in (tuple(inputs), dict(named_inputs)))
    fake.ignore((*copied.parameters(), *copied.buffers()))
    fake.ignore(x for x in tree_leaves((inputs, named_inputs)) if isinstance(x, Tensor))
    layers: list[LayerInput] = []

    def left(name: str, module: nn.Module, called: Any, output: Any) -> None:
        x = first_tensor(called)
        if x is not None and is_layer(module):
            kind = "norm" if is_norm_layer(module) else "product"
            out = sum(y.nbytes for y in tree_leaves(output) if isinstance(y, Tensor))
            layers.append(LayerInput(name, kind, x.numel(), x.element_size(), out))

    transformed = is_transformed(copied)
    with observed(copied) if transformed else Watcher(path), module_path(copied, path, left):
        if transformed:
            rewrite_of(copied).watcher = Watcher(path)
        fake.counting = True
        with fake:
            outputs = copied(*inputs, **named_inputs)
            forward_operations = len(fake.timeline)
            found = explain_outputs(copied, outputs, transformed)
            savings = _savings(copied, outputs)
            tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if backward and tensors:
                del outputs
                path.append("backward")
                torch.autograd.backward(tensors, [torch.empty_like(x) for x in tensors])
    return Facts(found.rows, found.held_bytes, layers, savings, fake.timeline, forward_operations)


def _savings(model: nn.Module, outputs: Any) -> list[Saving]:
    """What the graph behind outputs keeps, each with how it would be kept at another ratio."""
    own = storages((*model.parameters(), *model.buffers()))
    found: list[Saving] = []
    seen: set[int] = set()

    def fixed(tensors: Iterable[Tensor | None]) -> int:
        """Bytes of storages that nobody counted yet."""
        fresh = {k: v for k, v in storages(tensors).items() if k not in own and k not in seen}
        seen.update(fresh)
        return sum(fresh.values())

    for node in nodes(outputs):
        saved = dict(enumerate(saved_by(node)))
        for note in node.metadata.get(NOTES, ()):
            tensors = [saved.pop(i, None) for i in range(len(saved) + 2)[note.place]]
            if note.storage in own:
                continue
            if note.kind in ("prune", "norm"):
                beside = fixed(saved.values()) if note.kind == "norm" else 0
                if note.kind == "norm":
                    saved.clear()
                elif note.place == slice(0, 0):  # kept by the native operation
                    saved = {i: x for i, x in saved.items() if x is None or storage_of(x) != note.storage}
                itemsize = note.dtype.itemsize
                found.append(
                    Saving(
                        note.kind,
                        note.layer or None,
                        note.key,
                        note.storage,
                        note.storage_bytes,
                        note.numel,
                        itemsize,
                        beside,
                        note.beside,
                    )
                )
            elif note.kind == "exact":
                saved |= {-1 - i: x for i, x in enumerate(tensors)}
            else:
                found.append(Saving("fixed", fixed_bytes=fixed(tensors)))
        for x in saved.values():
            if x is not None and (storage := storage_of(x)) not in own:
                found.append(Saving("exact", storage=storage, storage_bytes=x.untyped_storage().nbytes()))
    return found


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def set_ratios(model: nn.Module, ratios: Mapping[str, float] | float) -> None:
    """One ratio for every layer of a transformed model, or some by name."""
    if not is_transformed(model):
        raise ValueError("ratios are of a transformed model: call surgeon_fx.transform(model) first")
    table = rewrite_of(model).table
    if isinstance(ratios, (int, float)):
        table.fill(ratios)
    else:
        table.update(ratios)


def is_shape(value: Any) -> bool:
    """Whether an input is given as a shape."""
    return isinstance(value, (tuple, list)) and bool(value) and all(type(size) is int for size in value)


def _fake_inputs(values: Any, device: str) -> Any:
    def fake(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_device(x, device), requires_grad=False)

    def shape(value: Any) -> Any:
        return torch.empty(tuple(value), device=device) if is_shape(value) else value

    values = {k: shape(v) for k, v in values.items()} if isinstance(values, dict) else tuple(shape(v) for v in values)
    return tree_map_only(Tensor, fake, values)
