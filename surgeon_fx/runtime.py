"""What runs when a transformed model is called.

`Rewrite` is the state of one transformed model: its ratios, its layers, the graphs captured of it. `Forward` takes the
place of the model's forward: it decides whether a call is one of training, turns the interpreter on, and hands the call
to Dynamo, which captures it, checks that a capture still holds, and runs the graphs that our passes rewrote.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx import allocator
from surgeon_fx.config import Config
from surgeon_fx.distributed import gathers_weights
from surgeon_fx.ops.compiler_mode import CompilerMode
from surgeon_fx.ops.interpreter import Interpreter, current_interpreter
from surgeon_fx.ops.keep import one_forward
from surgeon_fx.ops.slots import Slots
from surgeon_fx.passes.capture import Backend, Break, Capture
from surgeon_fx.passes.watch import Watcher
from surgeon_fx.ratio_table import RatioTable

log = logging.getLogger("surgeon_fx")

RECOMPILE_LIMIT = 32
# Errors of the capture leave a frame to Python and the interpreter; NumPy stays NumPy, with its own random numbers.
# Floats of a model are guarded: without NumPy, Dynamo loses those that it makes inputs of a graph once they change.
DYNAMO: dict[str, Any] = {"suppress_errors": True, "trace_numpy": False, "specialize_float": True}
_numbers = itertools.count()


class Rewrite:
    """One transformed model."""

    def __init__(self, module: nn.Module, layers: dict[str, nn.Module], excluded: set[str], config: Config) -> None:
        self.module, self.layers, self.excluded, self.config = module, layers, excluded, config
        self.slots = Slots(RatioTable(layers), config.exact_saves)
        self.captures: list[Capture] = []
        self.ran: list[Capture] | None = None  # set while somebody wants to know which graphs run
        self.outside: list[Break] | None = None  # likewise, calls that ran in no graph
        self.watcher: Watcher | None = None  # likewise, where autograd's nodes come from
        self.plans: dict[Any, Any] = {}  # the planner's twins of the model, which need not be captured again
        self.generator: torch.Generator | None = None  # which samples an importance pass looks at
        self.retired = False  # taken out of its model again; somebody may still hold its forwards
        self.original: nn.Module | None = None  # of a wrapped model: its wrapper refers to it weakly
        self._said: set[str] = set()

    @property
    def table(self) -> RatioTable:
        return self.slots.table

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {
            "captures": [],
            "ran": None,
            "outside": None,
            "watcher": None,
            "plans": {},
            "generator": None,
            "original": None,
            "_said": set(),
        }
        return {**self.__dict__, **fresh}  # captured again where it is copied or unpacked

    def owners(self) -> dict[int, str | None]:
        """From a parameter's identity to the key of the layer that owns it: the nearest around it that is in the table.

        A parameter of no layer has the key without a name; one of a module that was filtered out has None.
        """
        names: dict[int, str | None] = {}
        for name, module in self.module.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    names.setdefault(id(parameter), self._layer_around(name))
        return names

    def _layer_around(self, name: str) -> str | None:
        while True:
            if name in self.layers:
                return self.slots.key(name)
            if name in self.excluded:
                return None
            if not name:
                return self.slots.key("")
            name = name.rpartition(".")[0]

    def layer_ids(self) -> dict[str, str]:
        """Keys of layers by the identity of their module, as Dynamo writes it down."""
        return {str(id(module)): self.slots.key(name) for name, module in self.layers.items()}

    def interpreter(self) -> Interpreter:
        found: dict[int, str | None] = {}

        def owner(parameter: Tensor) -> str | None:
            if id(parameter) not in found:
                found.update(self.owners())  # sharded modules take up their gathered parameters when they run
            return found.setdefault(id(parameter), self.slots.key(""))

        if self.config.share_saves and not self.slots.gathers:
            self.slots.gathers = gathers_weights(self.module)
        took_over = self._outside if self.config.capture else None
        return Interpreter(self.slots.key(""), owner, took_over, self.config.share_saves)

    def compiler_mode(self) -> CompilerMode:
        return CompilerMode(
            [(module, self.slots.key(name)) for name, module in self.layers.items()], self.slots.key("")
        )

    def _outside(self, function: Any) -> None:
        """A call that no graph holds, though graphs were wanted."""
        name = getattr(function, "__name__", str(function))
        if self.outside is not None:
            self.outside.append(Break(name, "ran outside of any graph"))
        if name not in self._said:
            self._said.add(name)
            log.info("%s runs outside of any graph; the interpreter rewrites it call by call", name)


@dataclass
class Forward:
    """The forward of a transformed model, and of its parts when they are called on their own."""

    module: nn.Module
    rewrite: Rewrite
    own: Callable[..., Any] | None = None  # a forward that was set on the instance
    compiled: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.native, self.module))

    @property
    def __code__(self) -> types.CodeType:
        return self.native.__code__  # which `torch.export` asks for

    @property
    def __globals__(self) -> dict[str, Any]:  # which `torch.jit.script` asks for first
        raise AttributeError(
            "torch.jit.script compiles the source of a model, which is not what a transformed one runs: "
            "give it surgeon_fx.restore(model)"
        )

    @property
    def native(self) -> Callable[..., Any]:
        return self.own or type(self.module).forward

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            if self._is_compiled_by_others():
                with self.rewrite.compiler_mode():
                    return self.native(self.module, *args, **kwargs)
            return self.native(self.module, *args, **kwargs)
        native = not torch.is_grad_enabled() or self.rewrite.retired
        if native or current_interpreter() is not None or _transforms_active():
            return self.native(self.module, *args, **kwargs)
        try:
            result = self._run(args, kwargs)
        finally:
            allocator.trim_after_forward()
        allocator.trim_after_backward(result)
        return result

    def _is_compiled_by_others(self) -> bool:
        """While ours captures, a model is told that nobody compiles: see `passes/prepare_dynamo.py`."""
        compiles = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        return compiles and self.module is self.rewrite.module and torch.is_grad_enabled()

    def _run(self, args: Any, kwargs: Any) -> Any:
        with one_forward(), self.rewrite.interpreter():
            if not self.rewrite.config.capture:
                with self.rewrite.watcher or contextlib.nullcontext():
                    return self.native(self.module, *args, **kwargs)
            if self.compiled is None:
                self.compiled = self._compile()
            with torch._dynamo.config.patch(**DYNAMO):  # imported by torch.compile
                return self.compiled(self.module, *args, **kwargs)

    def _compile(self) -> Callable[..., Any]:
        from surgeon_fx.passes.prepare_dynamo import prepare_dynamo  # which imports Dynamo

        prepare_dynamo(Backend)
        native = self.native

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return native(module, *args, **kwargs)

        # Dynamo keeps captures by code object: each model has its own, so that models of one class share no limit.
        code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
        function = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
        accepted = inspect.signature(torch.compile).parameters
        options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
        return torch.compile(
            function,
            backend=Backend(self.rewrite),
            **{name: value for name, value in options.items() if name in accepted},
        )


@dataclass
class Named:
    """The forward of a layer that is more than one call on its weight: tells the interpreter which layer runs."""

    module: nn.Module
    rewrite: Rewrite
    name: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if torch.compiler.is_dynamo_compiling() or (interpreter := current_interpreter()) is None:
            return forward(self.module, *args, **kwargs)
        before, interpreter.layer = interpreter.layer, self.rewrite.slots.key(self.name)
        try:
            return forward(self.module, *args, **kwargs)
        finally:
            interpreter.layer = before


def _transforms_active() -> bool:
    """Whether the native functions must run: `torch.func` transforms, forward-mode gradients, tracing."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )
