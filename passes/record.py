"""Record: a quick capture for plans, of one call of a model on tensors without memory.

Dynamo takes ten times as long, because its graphs must hold for calls to come. A plan is of one call: a function mode
writes down each function as it runs, with the module and the line it runs in, and the passes take the graph from there.
What a list of calls cannot stand for (gradients turned off in part of it, custom autograd functions, tensors left on
a module, checkpointing) is `CannotRecord`, and is left to Dynamo.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from surgeon_fx.ops.interpreter import Interpreter
from surgeon_fx.passes.watch import calling_frame

CONSTANTS = (
    *(int, float, bool, complex, str, type(None), type(...), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class CannotRecord(Exception):
    """A call that is more than the functions it calls, one after the other."""


def record(model: nn.Module, args: Any, kwargs: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of one call, and the tensors that its placeholders stand for."""
    recorder = Recorder(model, tree_leaves((args, kwargs)))
    with recorder.following_modules(), recorder:
        outputs = model(*args, **kwargs)
    return recorder.finish(outputs)


def tensors_on_modules(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    for module in model.modules():
        for key, value in module.__dict__.items():
            empty = isinstance(value, CONSTANTS) or (isinstance(value, dict) and not value)  # as most of them are
            if key != "_modules" and not empty:
                yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


class Recorder(Interpreter):
    """Writes down what runs. An interpreter, so that a transformed model runs its native functions."""

    def __init__(self, model: nn.Module, inputs: list[Any]) -> None:
        super().__init__("", lambda parameter: None)
        self.model, self.graph = model, fx.Graph()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.nodes: dict[int, fx.Node] = {}
        self.members: dict[int, tuple[fx.Node, int]] = {}  # of a tuple; each becomes a node when it is used
        self.alive: list[Any] = []  # everything that was told apart by its identity
        self.given: list[Tensor] = []  # what placeholders stand for, in their order
        self.there = {id(x): x for x in (*inputs, *tensors_on_modules(model)) if isinstance(x, Tensor)}
        self.last_placeholder: fx.Node | None = None
        self.made: set[int] = set()
        self.stack: list[dict[str, tuple[str, type]]] = [{}]
        self.autocast = self._autocast()
        self.reason: CannotRecord | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.reason is None:
            try:
                self._record(func, args, kwargs or {}, result)
            except CannotRecord as reason:  # not raised in the model, which may have a context to leave
                self.reason = reason
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name != "__setitem__" and not any(isinstance(x, Tensor) for x in tree_leaves(result)):
            if result is None and func is not torch._assert:
                raise CannotRecord(f"{name} returns nothing")
            return  # a question
        self._check_surroundings(name)
        if name == "unbind" and sys._getframe(2).f_code is Tensor.__iter__.__code__:
            self.alive.append(result)
            for i, one in enumerate(result):  # Dynamo takes a tensor apart row by row
                self._write(one, self._node(Tensor.__getitem__, "__getitem__", (args[0], i), {}))
        else:
            self._write(result, self._node(func, name, args, kwargs))

    def _write(self, result: Any, node: fx.Node) -> None:
        """What is known of a node: its result, and where it ran."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        frame = calling_frame(sys._getframe(3), inside=record.__code__)
        where = "" if frame is None else f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}\n'
        node.meta = {"example_value": result, "nn_module_stack": self.stack[-1], "stack_trace": where}
        self.alive.append(result)
        self.made.update(id(x) for x in tensors if id(x) not in self.there)
        if isinstance(result, Tensor):
            self.nodes[id(result)] = node
        elif tensors:
            self._name_members(result, node)

    def _name_members(self, result: Any, node: fx.Node) -> None:
        if not isinstance(result, (tuple, list)):
            raise CannotRecord(f"{node.target} returns a {type(result).__name__}")
        for i, one in enumerate(result):
            if isinstance(one, Tensor):
                self.nodes.pop(id(one), None)
                self.members[id(one)] = (node, i)
            elif isinstance(one, (tuple, list)):
                raise CannotRecord(f"{node.target} returns tuples in a tuple")

    def _node(self, func: Any, name: str, args: Any, kwargs: Any) -> fx.Node:
        """The call as Dynamo would write it: methods by name, operators as Python's."""
        args, kwargs = fx.node.map_aggregate((tuple(args), dict(kwargs)), self._argument)
        plain = name.strip("_")
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if name.startswith("__") and hasattr(operator, plain):
            return self.graph.call_function(getattr(operator, plain), args, kwargs)
        if name.startswith("__r") and hasattr(operator, plain[1:]):
            return self.graph.call_function(getattr(operator, plain[1:]), (args[1], args[0]), kwargs)
        if func is getattr(Tensor, name, None):
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._value(x)
        if isinstance(x, CONSTANTS):
            return x
        raise CannotRecord(f"an argument is a {type(x).__name__}")

    def _value(self, x: Tensor) -> fx.Node:
        if id(x) in self.nodes:
            return self.nodes[id(x)]
        if id(x) in self.members:
            parent, i = self.members.pop(id(x))
            with self.graph.inserting_after(parent):
                node = self.graph.call_function(operator.getitem, (parent, i))
            node.meta = {**parent.meta, "example_value": x}
        elif id(x) in self.there:
            node = self._placeholder(x)
        else:
            raise CannotRecord("a tensor comes from somewhere else")
        self.nodes[id(x)] = node
        return node

    def _placeholder(self, x: Tensor) -> fx.Node:
        last = self.last_placeholder
        with self.graph.inserting_before() if last is None else self.graph.inserting_after(last):
            node = self.last_placeholder = self.graph.placeholder(f"given_{len(self.given)}")
        node.meta["example_value"] = x
        self.given.append(x)
        return node

    def _check_surroundings(self, name: str) -> None:
        if not torch.is_grad_enabled() or self._autocast() != self.autocast:
            raise CannotRecord(f"{name} runs where gradients are off, or under autocast")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise CannotRecord(f"{name} runs under saved-tensor hooks")

    @staticmethod
    def _autocast() -> bool:
        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keeps the modules that run, as Dynamo writes them down."""

        def enter(module: nn.Module, _: Any) -> None:
            name = self.names.get(id(module))
            inner = {} if name is None else {str(id(module)): (name, type(module))}
            self.stack.append({**self.stack[-1], **inner})

        def leave(*_: Any) -> None:
            self.stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, outputs: Any) -> tuple[fx.GraphModule, list[Tensor]]:
        leaves = tree_leaves(outputs)
        if self.reason is not None:
            raise self.reason
        if any(not isinstance(x, (Tensor, *CONSTANTS)) for x in leaves):
            raise CannotRecord("what the model returns cannot be looked into")
        if any(id(x) in self.made for x in tensors_on_modules(self.model)):
            raise CannotRecord("a tensor is left on a module")
        self.graph.output(tuple(self._value(x) for x in leaves if isinstance(x, Tensor)))
        with _use_lazy_graph_module(True):  # plans run it node by node: its code is written if it is called
            return _make_graph_module(nn.Module(), self.graph), self.given
