"""What Dynamo is told of us, once, before it captures the first model.

A model that asks whether it is being compiled is told no while it is captured: it runs the code it runs in eager.
Hugging Face's models, for one, take other roads when they are compiled: a mask is built where eager needs none, a scan
takes the place of a loop. Ratio 0 would not be equal to the bit, and more would be kept.

A convolution whose batch size may change is captured once for every size. Torch asks which library would run it, to
guess the strides of its output, and that depends on whether there are 16 samples: a guard, and one more capture, for a
graph that is the same. It is asked about the sizes at hand instead.

Both replace a private function of torch's by one that does nothing new unless a compiler of ours captures in this
thread. If torch has no such function any more, models are captured without.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import FakeTensor

from surgeon_fx.ops.interpreter import Interpreter, current_interpreter

log = logging.getLogger("surgeon_fx")

TORCH = str(Path(torch.__file__).parent)

_lock = threading.Lock()
_prepared = False


def prepare_dynamo(compiler: type) -> None:
    """Installs the answers, and keeps Dynamo from capturing the interpreter as code of its own.

    It inlines the interpreter where it captures a call. As a frame, the functions that is given may be new objects in
    each call, such as `Tensor.device.__get__`, which a guard on their identity mixes up.
    """
    global _prepared
    with _lock:
        if _prepared:
            return
        for install in (_answer_as_eager, _ask_at_hand, _leave_interpreter, _say_less):
            try:
                install(compiler)
            except (AttributeError, ImportError) as missing:  # another version of torch
                log.warning("this torch lacks what captures are helped by, and they go without: %s", missing)
        _prepared = True


def _current(compiler: type) -> Any:
    """What Dynamo captures in this thread, if it is for a compiler of ours; else None."""
    try:
        output = InstructionTranslator.current_tx().output
        called: Any = inspect.unwrap(output.compiler_fn)  # type: ignore[arg-type]
    except AttributeError:  # nothing is captured
        return None
    return output if isinstance(getattr(called, "compiler_fn", called), compiler) else None


class Answers(dict[Any, Any]):
    """What Dynamo answers to functions that ask about tracing; for a model that `compiler` captures, as eager would.

    Torch's own code gets Dynamo's answers: what it asks for is how to be captured.
    """

    def __init__(self, answers: dict[Any, Any], compiler: type) -> None:
        super().__init__(answers)
        self.compiler = compiler

    def __getitem__(self, function: Any) -> Any:
        if function is torch.compiler.is_compiling and self._asked_by_a_model():
            return False
        return super().__getitem__(function)

    def _asked_by_a_model(self) -> bool:
        output = _current(self.compiler)
        return output is not None and not output.current_tx.f_code.co_filename.startswith(TORCH)


def _answer_as_eager(compiler: type) -> None:
    import torch._dynamo.variables.torch as dynamo

    answers = Answers(dynamo.tracing_state_functions(), compiler)
    dynamo.tracing_state_functions = lambda: answers  # type: ignore[assignment]


def _ask_at_hand(compiler: type) -> None:
    select: Callable[..., Any] = torch._C._select_conv_backend

    def select_conv_backend(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, FakeTensor) and not _is_static(input) and _current(compiler) is not None:
            input = _at_hand(input)
        return select(input, *args, **kwargs)

    torch._C._select_conv_backend = select_conv_backend


def _is_static(x: Tensor) -> bool:
    return all(type(size) is int for size in (*x.shape, *x.stride()))


def _at_hand(x: Tensor) -> Tensor:
    """The like of a tensor, with the sizes it has in the call that is captured."""
    given: tuple[Any, ...] = (x.shape, x.stride())
    sizes, strides = ([s if type(s) is int else s.node.hint for s in one] for one in given)
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


def _leave_interpreter(compiler: type) -> None:
    from torch._dynamo.decorators import skip_code

    skip_code(Interpreter.__torch_function__.__code__)
    Interpreter._call = torch._dynamo.disable(Interpreter._call)  # type: ignore[method-assign]


def _say_less(compiler: type) -> None:
    """Frames that cannot be captured are for the interpreter: a line of our own log and `explain(...).breaks` say so.

    Dynamo would print the traceback of every frame around an error of the model's own, and hints for its own users.
    """
    for name in ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor"):
        logging.getLogger(name).addFilter(lambda record: current_interpreter() is None)
