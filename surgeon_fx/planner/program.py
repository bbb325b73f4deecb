"""The program itself, on tensors that have no memory: what it allocates is followed from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from surgeon_fx.kernels.backends import FAKES


class Program(FakeTensorMode):
    """Runs operations on tensors without memory, and follows every storage they create from birth to death."""

    results: ClassVar[dict[Any, Any]] = {}  # layouts of what pure operations return, by their arguments

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.path: list[str] = []  # ends with the module that runs
        self.inside = self.counting = False
        self.blanks: dict[torch.device, FakeTensor] = {}
        self.begin(())

    def begin(self, there: Iterable[Any]) -> None:
        """Counts from zero; the tensors among `there` were there before."""
        self.live, self.timeline = 0, list[tuple[str, int]]()
        self.known: dict[int, weakref.ref[Any]] = {}  # storages by their identity
        for x in there:
            if isinstance(x, Tensor):
                self._follow(x.untyped_storage(), 0)

    def fake(self, x: Tensor, device: torch.device, requires_grad: bool = False) -> FakeTensor:
        """`FakeTensor(self, x, device)` for a sixth of the time: what that sets on every fake is taken from a first."""
        if device not in self.blanks:
            self.blanks[device] = FakeTensor(self, torch.empty(0, device="meta"), device)
        made: FakeTensor = Tensor._make_subclass(
            FakeTensor, x, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self.blanks[device].__dict__)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        if self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.inside = True  # what an operation is made of here says nothing about what it takes there
        try:
            result = self._shortcut(func, args, kwargs or {})
            if result is None:
                result = self._remembered(func, types, args, kwargs or {})
                if func in NORMS:
                    result = _with_real_statistics(args[0], args[NORMS[func]], result)
        finally:
            self.inside = False
        if not self.counting:
            return result
        born = False
        for x in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self.known:
                size, born = storage.nbytes(), True
                self.live += size
                self._follow(storage, size)
        if born:
            self.timeline.append((self.path[-1] if self.path else "", self.live))
            if func is aten.add.Tensor and in_backward():
                self._follow_sum(args[0], result)
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
            return self.fake(alias, device)
        if func in FAKES:
            made = FAKES[func](*(meta_like(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
            return self.fake(made, device) if isinstance(made, Tensor) else tuple(self.fake(x, device) for x in made)
        return None

    def _remembered(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What the mode makes of a call; blocks of a network repeat, so a call it made before is not worked out again.

        The mode remembers too, at several times the price: it has more to tell apart.
        """
        key = _described((func, torch.get_default_dtype(), *args, *kwargs.items())) if _is_pure(func) else None
        if key is not None and (known := self.results.get(key)) is not None:
            made = [None if one is None else self.fake(_empty(one), one[3]) for one in known]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None:
            results = (result,) if isinstance(result, Tensor) else result
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if isinstance(results, tuple) and all(_is_plain(x, given) for x in results):
                if len(self.results) >= MOST_RESULTS:
                    self.results.clear()
                self.results[key] = tuple(None if x is None else _layout(x) for x in results)
        return result

    def _follow_sum(self, x: Tensor, result: Tensor) -> None:
        """Autograd adds to a gradient in place if nobody else holds it, but never to a fake.

        One that dies before anything else is born was not held: the sum took no memory of its own.
        """
        timeline, operations = self.timeline, len(self.timeline)
        storage = x.untyped_storage()
        if (size := storage.nbytes()) == result.untyped_storage().nbytes():
            weakref.finalize(storage, _forget_last, timeline, operations, size)

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        """Until it dies, or another count begins and drops the reference."""
        key = storage._cdata

        def died(_: Any) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, died)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _forget_last(timeline: list[tuple[str, int]], operations: int, size: int) -> None:
    if len(timeline) == operations and in_backward():
        path, live = timeline[-1]
        timeline[-1] = path, live - size


def _layout(x: FakeTensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.fake_device


def _empty(layout: tuple[Any, ...]) -> Tensor:
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")


def _described(value: Any) -> Any:
    """Equal for arguments that a pure operation treats alike; None if that cannot be told."""
    if isinstance(value, FakeTensor):
        return None if value.constant is not None or value.layout is not torch.strided else _layout(value)
    if isinstance(value, (tuple, list)):
        found = tuple(_described(x) for x in value)
        return None if None in found else found
    if value is None or isinstance(value, SCALARS) or callable(value):
        return (type(value), value)  # 1 is not 1.0, and neither is True
    return None


@cache
def _is_pure(func: Any) -> bool:
    """Whether what a function returns is its own, and its layout follows from layouts."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # of a higher order
        return False
    plain = all(one.alias_info is None and str(one.type) in ("Tensor", "Optional[Tensor]") for one in schema.returns)
    named = func.namespace == "aten" and not schema.is_mutable and bool(schema.returns)
    return plain and named and not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)


def _is_plain(x: Any, given: Container[int]) -> bool:
    """Whether `torch.empty_strided` makes the like of it. `given` are the storages of the arguments."""
    if x is None:
        return True
    if not isinstance(x, FakeTensor) or x.constant is not None or x.layout is not torch.strided or x.storage_offset():
        return False
    storage = x.untyped_storage()
    return storage._cdata not in given and storage.nbytes() == _empty(_layout(x)).untyped_storage().nbytes()


def meta_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


MOST_RESULTS = 20_000
SCALARS = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
IN_PLACE = {
    *(aten.add_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.sub_.Tensor, aten.relu_.default),
    *(aten.div_.Scalar, aten.bernoulli_.float),
}
VIEWS = {
    *(aten.detach.default, aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.select.int, aten.unsqueeze.default, aten.expand.default, aten.as_strided.default, aten.slice.Tensor),
    aten._unsafe_view.default,
}


# Norms whose fakes take statistics in the input's precision, and where their weight stands: see below.
NORMS = {
    aten.native_layer_norm.default: 2,
    **dict.fromkeys((aten.native_group_norm.default, aten.native_batch_norm.default), 1),
}


def _with_real_statistics(x: Tensor, weight: Tensor | None, result: Any) -> Any:
    """On a CPU, half-precision inputs under a float32 weight, as autocast has them, have float32 statistics."""
    if x.device.type != "cpu" or weight is None or weight.dtype is not torch.float32 or x.dtype is torch.float32:
        return result
    return (result[0], *(statistic.to(weight.dtype) for statistic in result[1:]))


def planned_device(x: Tensor, device: str) -> torch.device:
    return torch.device(device) if x.device.type == "meta" else x.device
