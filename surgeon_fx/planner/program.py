"""The program itself, on tensors that have no memory: what it allocates is followed from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves, tree_map_only

from surgeon_fx.kernels.backends import FAKES


class Program(FakeTensorMode):
    """Runs operations on tensors without memory, and follows every storage they create from birth to death."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.path: list[str] = []  # ends with the module that runs
        self.inside = self.counting = False
        self.begin(())

    def begin(self, there: Iterable[Any]) -> None:
        """Counts from zero; the tensors among `there` were there before."""
        self.live, self.timeline = 0, list[tuple[str, int]]()
        self.known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for x in there:
            if isinstance(x, Tensor):
                self.known[x.untyped_storage()] = None

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
                weakref.finalize(storage, self._died, size, self.timeline)
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
            made = FAKES[func](*(meta_like(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
            return tree_map_only(Tensor, lambda x: FakeTensor(self, x, device), made)
        return None

    def _died(self, size: int, timeline: list[tuple[str, int]]) -> None:
        if timeline is self.timeline:  # not of a count that is over
            self.live -= size


def meta_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
IN_PLACE = {aten.add_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.sub_.Tensor, aten.relu_.default}
VIEWS = {
    *(aten.detach.default, aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.select.int, aten.unsqueeze.default, aten.expand.default, aten.as_strided.default, aten.slice.Tensor),
}


def fake_like(x: Tensor, fake: FakeTensorMode, device: str) -> Tensor:
    """Built from its parts: the same as `torch.empty_like` in the mode, for a third of the time."""
    return FakeTensor(fake, meta_like(x), planned_device(x, device))


def planned_device(x: Tensor, device: str) -> torch.device:
    return torch.device(device) if x.device.type == "meta" else x.device
