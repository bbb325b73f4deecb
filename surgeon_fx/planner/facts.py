"""Facts about one training step, found without running it: the program itself, on tensors that have no memory.

A twin of the model, over fake parameters, goes through forward and backward. Everything the real step would do is done,
by the same code, except the arithmetic: hooks decide what is kept, storages are born and die. So what is counted here
is what is counted there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves, tree_map_only

from surgeon_fx.api import is_transformed, rewrite_of, transformed_part
from surgeon_fx.distributed import gathers_weights, reshard, unwrapped
from surgeon_fx.explain import Row, explain_outputs, module_path, observed
from surgeon_fx.inputs import first_tensor
from surgeon_fx.kernels.layout import is_dense
from surgeon_fx.modules import Trains, is_layer, is_norm_layer, trains
from surgeon_fx.ops.common import RECORDS
from surgeon_fx.ops.keep import is_prunable, rounded_bytes
from surgeon_fx.ops.rounded import NOTE
from surgeon_fx.ops.slots import NOTES, memory_key
from surgeon_fx.passes.capture import Backend
from surgeon_fx.passes.record import CannotRecord, record, tensors_on_modules
from surgeon_fx.passes.watch import Watcher
from surgeon_fx.planner.arithmetic import LayerInput, Saving
from surgeon_fx.planner.program import Program, meta_like, planned_device
from surgeon_fx.planner.unsharded import gathered_dtypes, without_sharding
from surgeon_fx.retained import nodes, saved_by, storages

log = logging.getLogger("surgeon_fx")


@dataclass
class Facts:
    """What one step does to memory."""

    rows: list[Row]
    saved_bytes: int
    layers: list[LayerInput]
    savings: list[Saving]  # of a forward alone
    timeline: list[tuple[str, int]] = field(default_factory=list)  # live bytes after each operation, and where
    forward_operations: int = 0

    @property
    def peak_bytes(self) -> int:
        return max((live for _, live in self.timeline), default=0)


class Twin(NamedTuple):
    """A model over fake tensors, the program they belong to, its fake inputs, and one call of it."""

    model: nn.Module
    program: Program
    inputs: tuple[Any, Any]
    forward: Callable[[], Any]


def _twin_of(model: nn.Module, inputs: Any, named_inputs: Any, which: Trains, device: str) -> Twin:
    """A transformed model keeps its twins: what was captured of one need not be captured again."""
    fake = Program()
    chosen = trains(model, which)
    trained = {id(p): chosen(name, p) for name, p in model.named_parameters()}
    with fake:
        args, kwargs = _fake_inputs(inputs, device), _fake_inputs(named_inputs, device)
    if not is_transformed(model):
        copied = _twin(model, fake, trained, device)
        return Twin(copied, fake, (args, kwargs), lambda: copied(*args, **kwargs))
    signature = (
        device,
        tuple(_described(x) for x in tree_leaves((args, kwargs))),
        tuple((name, _described(p), trained[id(p)]) for name, p in model.named_parameters()),
        tuple((name, module.training) for name, module in model.named_modules()),
    )
    plans = rewrite_of(model).plans
    if signature not in plans:
        plans.clear()  # one is enough: methods side by side plan the same step
        plans[signature] = _captured_twin(lambda: _twin(model, fake, trained, device), fake, args, kwargs)
    return plans[signature]


def _captured_twin(copy_model: Callable[[], nn.Module], fake: Program, args: Any, kwargs: Any) -> Twin:
    copied = copy_model()
    rewrite = rewrite_of(copied)
    with fake:
        if rewrite.config.capture:
            try:
                graph, given = record(copied, args, kwargs)
                call = Backend(rewrite)(graph, given)
                return Twin(copied, fake, (args, kwargs), lambda: call(*given))
            except CannotRecord as reason:
                log.info("Dynamo captures the model to plan it: %s", reason)
                copied = copy_model()  # the other may have been left halfway
        copied(*args, **kwargs)  # captures it
    return Twin(copied, fake, (args, kwargs), lambda: copied(*args, **kwargs))


def _described(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x


def _twin(model: nn.Module, fake: Program, trained: Mapping[int, bool], device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    dtypes = gathered_dtypes(model)
    for parameter in model.parameters():
        empty = meta_like(parameter).to(dtypes.get(id(parameter), parameter.dtype))
        where = planned_device(parameter, device)
        memo[id(parameter)] = new = fake.fake(empty, where, requires_grad=trained[id(parameter)])
        new._is_param = True  # as nn.Parameter does, which takes longer
        new.grad = fake.fake(empty, where) if new.requires_grad else None  # already there, as after a first step
    others = (x for x in tensors_on_modules(model) if id(x) not in memo)
    memo |= {id(x): fake.fake(meta_like(x), planned_device(x, device)) for x in others}
    twin = copy.deepcopy(without_sharding(model), memo)
    for module in twin.modules():
        if (forward := module.__dict__.get("_original_forward")) is not None:  # accelerate's runs the model, not a copy
            module.__dict__["forward"] = forward
    if is_transformed(twin):
        rewrite_of(twin).slots.gathers = gathers_weights(model)
    return twin


@contextlib.contextmanager
def _watched(model: nn.Module, path: list[str], left: Callable[[str, Tensor, int], None]) -> Iterator[None]:
    """Keeps the path of the module that runs, and has every call of a layer told to `left`."""
    path.clear()
    watcher = Watcher(path, left)
    if is_transformed(model) and rewrite_of(model).config.capture:
        with observed(model, watcher):
            yield
        return

    def done(name: str, module: nn.Module, called: Any, output: Any) -> None:
        if is_layer(module) and (x := first_tensor(called)) is not None:
            left(name, x, sum(y.nbytes for y in tree_leaves(output) if isinstance(y, Tensor)))

    with module_path(model, path, done), observed(model, watcher) if is_transformed(model) else watcher:
        yield


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The garbage collector rests: it goes through every object of torch's again and again, and finds nothing here."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def explaining_numbers() -> Iterator[None]:
    """Says what it means that a tensor without memory was asked for a number."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"model reads a number out of a tensor ({error}), as `.item()`, `if x.mean() > 0` and `nonzero` do, and a "
            "plan has none: surgeon_fx.explain(model, inputs) runs the model and measures what it holds"
        ) from error


@no_collection()
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
    transformed = is_transformed(model)
    model = transformed_part(model) if transformed else unwrapped(model)
    reshard(model)
    with explaining_numbers():
        copied, fake, given, forward = _twin_of(model, tuple(inputs), dict(named_inputs), train, device)
    if ratios is not None:
        set_ratios(copied, ratios)
    elif transformed:
        set_ratios(copied, dict(rewrite_of(model).table))
    layers: list[LayerInput] = []

    def left(name: str, x: Tensor, output_bytes: int) -> None:
        kind = "norm" if is_norm_layer(copied.get_submodule(name)) else "product"
        layers.append(LayerInput(name, kind, x.numel(), x.element_size(), output_bytes))

    with fake:
        for x in tree_leaves(given):
            if isinstance(x, Tensor):
                x.grad = None  # of an earlier plan: a step's inputs are new
        fake.begin((*copied.parameters(), *copied.buffers(), *tree_leaves(given)))
        fake.counting = True
        with _watched(copied, fake.path, left), explaining_numbers():
            outputs = forward()
        forward_operations = len(fake.timeline)
        found = explain_outputs(copied, outputs, transformed)
        savings = [] if backward else _savings(copied, outputs)
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if backward and tensors:
            del outputs
            fake.path.append("backward")
            torch.autograd.backward(tensors, [torch.empty_like(x) for x in tensors])
        fake.counting = False
    return Facts(found.rows, found.held_bytes, layers, savings, fake.timeline, forward_operations)


def _savings(model: nn.Module, outputs: Any) -> list[Saving]:
    """What the graph behind outputs keeps, each with how it would be kept at another ratio."""
    own = storages((*model.parameters(), *model.buffers()))
    table = rewrite_of(model).table if is_transformed(model) else {}
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
                beside = fixed(saved.values() if note.kind == "norm" else tensors[2:])  # or copies of a norm's weights
                if note.kind == "norm":
                    saved.clear()
                elif note.place == slice(0, 0):  # kept by the native operation
                    saved = {i: x for i, x in saved.items() if x is None or storage_of(x) != note.storage}
                itemsize = note.dtype.itemsize
                found.append(
                    Saving(
                        note.kind,
                        note.layer if note.layer in table else None,
                        note.key,
                        note.storage,
                        note.storage_bytes,
                        note.numel,
                        itemsize,
                        beside,
                        note.beside,
                        note.sharers,
                        note.source,
                        note.places,
                    )
                )
            elif note.kind == "exact":
                saved |= {-1 - i: x for i, x in enumerate(tensors)}
            else:
                found.append(Saving("fixed", fixed_bytes=fixed(tensors)))
        shared = RECORDS in node.metadata  # whoever prunes the same memory shares it instead
        for x in _without_rounded(saved.values(), found):
            if x is not None and (storage := storage_of(x)) not in own:
                key = memory_key(x) if shared and is_prunable(x) and is_dense(x) else None
                found.append(Saving("exact", None, key, storage, x.untyped_storage().nbytes()))
    return found


def _without_rounded(tensors: Iterable[Tensor | None], found: list[Saving]) -> Iterator[Tensor | None]:
    """Rounded activations, two tensors each, are added to `found`; the others are left."""
    ahead = iter(tensors)
    for x in ahead:
        note = getattr(x, NOTE, None)
        if note is None:
            yield x
            continue
        size = rounded_bytes(note.numel, note.dtype, note.kind)
        found.append(Saving("rounded", None, note.key, note.storage, note.storage_bytes, fixed_bytes=size))
        next(ahead)


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
        return torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=planned_device(x, device), requires_grad=x.requires_grad
        )

    def shape(value: Any) -> Any:
        return torch.empty(tuple(value), device=device) if is_shape(value) else value

    values = {k: shape(v) for k, v in values.items()} if isinstance(values, dict) else tuple(shape(v) for v in values)
    return tree_map_only(Tensor, fake, values)
