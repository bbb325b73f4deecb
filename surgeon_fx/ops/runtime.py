"""What the rewritten forwards of one model share while they run.

The outermost of them opens a session: every tensor that no policy takes is kept exactly, by record, so that sharing is
seen and nothing is held twice. Inside, a function of no layer follows the ratio of the layer that ran last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from surgeon_fx import allocator
from surgeon_fx.ops.policies import POLICIES, Policy
from surgeon_fx.ops.saved import Saved
from surgeon_fx.ratio_table import RatioTable

Observer = Callable[[Policy, Tensor, Saved], None]


class _State(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.sessions: list[Rewrite] = []  # innermost last
        self.policies = 0  # running
        self.observer: Observer | None = None  # told of every save: how `explain` looks on


state = _State()


class Rewrite:
    """One transformed model: its ratios, and whose weight is whose."""

    def __init__(self, table: RatioTable) -> None:
        self.table = table
        self.layers: dict[str, nn.Module] = {}  # those with a ratio
        self.running: str | None = None
        self.weights: dict[int, str] = {}
        self.active = False
        self.generator: torch.Generator | None = None  # which samples an importance pass looks at

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "running": None, "weights": {}, "active": False, "generator": None}

    def session(self, outermost: bool, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a forward of this model; the first one in opens the session, the root's end gives freed blocks back."""
        if torch.compiler.is_compiling():  # a compiler breaks its graph here: what is kept is decided in Python
            return torch.compiler.disable(self.session)(outermost, forward, args, kwargs)
        if self.active:
            return forward(*args, **kwargs)
        self.active, self.running = True, None if outermost else self.running
        self.weights = {id(p): name for name, m in self.layers.items() for p in m._parameters.values()}
        state.sessions.append(self)
        try:
            with saved_tensors_hooks(*hooks(POLICIES["unknown"](0.0))):
                result = forward(*args, **kwargs)
        finally:
            state.sessions.pop()
            self.active = False
            if outermost:
                allocator.trim()
        if outermost:
            allocator.trim_after_backward(result)
        return result

    def ratio(self, tensors: list[Tensor] = []) -> float:  # noqa: B006
        """What a function follows: the layer one of its tensors is a weight of, else the last layer that ran."""
        for x in tensors:
            if (name := self.weights.get(id(x))) is not None:
                self.running = name
        return 0.0 if self.running is None else self.table[self.running]


def hooks(policy: Policy) -> tuple[Callable[[Tensor], Saved], Callable[[Saved], Tensor]]:
    """Pack and unpack hooks for a policy."""
    observer = state.observer
    if observer is None:
        return policy.pack, _restore

    def pack(x: Tensor) -> Saved:
        saved = policy.pack(x)
        observer(policy, x, saved)
        return saved

    return pack, _restore


def _restore(saved: Saved) -> Tensor:
    return saved.restore()


def run(policy: Policy, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a call natively, with the policy deciding what is kept for backward."""
    state.policies += 1
    try:
        with saved_tensors_hooks(*hooks(policy)):
            result = call(*args, **kwargs)
        policy.finish()
    finally:
        state.policies -= 1
    return result
