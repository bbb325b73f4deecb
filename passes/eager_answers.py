"""A model that asks whether it is being compiled is told no while it is captured: it runs the code it runs in eager.

Hugging Face's models, for one, take other roads when they are compiled: a mask is built where eager needs none, a scan
takes the place of a loop. Ratio 0 would not be equal to the bit, and more would be kept.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.variables.torch as dynamo
from torch._dynamo.symbolic_convert import InstructionTranslator

TORCH = str(Path(torch.__file__).parent)


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
        output = InstructionTranslator.current_tx().output
        compiler: Any = output.compiler_fn
        compiler = compiler and inspect.unwrap(compiler)
        ours = isinstance(getattr(compiler, "compiler_fn", compiler), self.compiler)
        return ours and not output.current_tx.f_code.co_filename.startswith(TORCH)


def answer_as_eager(compiler: type) -> None:
    """Installs the answers, once."""
    answers = Answers(dynamo.tracing_state_functions(), compiler)
    dynamo.tracing_state_functions = lambda: answers  # type: ignore[assignment]
