"""The second driver: substitutes saving operations call by call, where no graph holds a call.

It is on for as long as a transformed model runs. Dynamo sees through it, so graphs are captured as the model is
written and rewritten by the passes; while such a graph runs it is off. What is left for it is Python that Dynamo
skips, calls past its recompile limit, and `Config(capture=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from surgeon_fx.ops.keep import is_checkpointed
from surgeon_fx.ops.registry import Rule, rule_for
from surgeon_fx.ops.rounded import may_save, run_unknown
from surgeon_fx.ops.share import ACTIVATIONS, adding, handing_on, is_sum
from surgeon_fx.ops.slots import MARK, sharing_key

MOST_NODES = 64  # of the graph behind a computed weight

Owner = Callable[[Tensor], str | None]  # the key of the layer that owns a parameter; None if it may not be rewritten


class Interpreter(TorchFunctionMode):
    """`key` is used where no weight tells the layer; `took_over` is told of every function it rewrites.

    With `shares`, every norm and activation offers what it keeps (`surgeon_fx/ops/share.py`). Nobody knows yet who will
    read it: each is kept at its own ratio, and serves those that want no more.
    """

    layer: str | None = None  # the key of a layer without a weight, while it runs

    def __init__(
        self, key: str, owner: Owner, took_over: Callable[[Any], None] | None = None, shares: bool = False
    ) -> None:
        super().__init__()
        self.key, self.owner, self.took_over, self.shares = key, owner, took_over, shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # of this frame; is_compiling tells of other threads too
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        rule = rule_for(func, kwargs)
        if is_checkpointed():  # where backward runs it again, no interpreter is on: native, both times
            return func(*args, **kwargs)
        if self.shares and is_sum(func, args):
            return adding(func)(*args, **kwargs)
        if rule is None:
            return run_unknown(self.key, func, *args, **kwargs) if may_save(func) else func(*args, **kwargs)
        parameters = self._parameters_of(rule, args, kwargs)
        key = self._key_of(parameters)
        if key is None:
            return func(*args, **kwargs)
        if self.took_over is not None and (parameters or rule.family != "linear"):  # a product of activations is native
            self.took_over(func)
        op = rule.op
        if self.shares and op.__name__ in ACTIVATIONS:
            op, key = handing_on(op), sharing_key(key, ())
        elif self.shares and rule.family == "norm" and op.__name__ != "instance_norm":
            key = sharing_key(key, ())
        return op(key, *args, **kwargs)

    def _parameters_of(self, rule: Rule, args: Any, kwargs: Any) -> list[Tensor]:
        weights = [x for x in rule.weights_among(args, kwargs) if isinstance(x, Tensor)]
        return [x for weight in weights if (x := parameter_behind(weight)) is not None]

    def _key_of(self, parameters: list[Tensor]) -> str | None:
        for parameter in parameters:
            key = self.owner(parameter)
            if key is None or key != self.key:
                return key
        return self.layer or self.key


def parameter_behind(x: Tensor) -> Tensor | None:
    """The parameter that a tensor is, is a view of, or was computed from without any activation; else None."""
    if isinstance(x, torch.nn.Parameter):
        return x
    if isinstance(x._base, torch.nn.Parameter):
        return x._base
    ahead: list[Any] = [x.grad_fn]
    found = None
    for _ in range(MOST_NODES):
        node = ahead.pop() if ahead else None
        if node is None:
            return found
        if MARK in node.metadata:
            return None  # the output of a layer
        if (leaf := getattr(node, "variable", None)) is not None:
            if not isinstance(leaf, torch.nn.Parameter):
                return None
            found = leaf
        ahead.extend(following for following, _ in node.next_functions if following is not None)
    return None


def current_interpreter() -> Interpreter | None:
    """The interpreter that is on in this thread."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return next((mode for mode in modes if isinstance(mode, Interpreter)), None)


@contextmanager
def paused() -> Iterator[None]:
    """Function modes are off: a rewritten graph needs none, and may not be rewritten twice."""
    if not torch._C._len_torch_function_stack():
        yield
    elif isinstance(mode := torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1), Interpreter):
        torch._C._pop_torch_function_stack()
        try:
            yield
        finally:
            torch._C._push_on_torch_function_stack(mode)
    else:  # somebody else's is on top
        with torch._C.DisableTorchFunction():
            yield
