"""Functions that keep an activation as it is: the native function runs, and whoever prunes the same memory shares it.

A row of `KEPT` says which the function keeps, its input, its output or both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import remember_exact
from surgeon_fx.ops.slots import find_slot

KEPT = {
    "softmax": "output",
    "log_softmax": "output",
    "sqrt": "output",
    "rsqrt": "output",
    "reciprocal": "output",
    "log": "input",
    "abs": "input",
    "std": "both",
    "var": "input",
    "amax": "both",
    "amin": "both",
}


def _exact(name: str) -> Callable[..., Tensor]:
    native: Callable[..., Tensor] = getattr(F, name, None) or getattr(torch, name)

    def exact(key: str, *args: Any, **kwargs: Any) -> Tensor:
        output = native(*args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        if output.grad_fn is not None and isinstance(x, Tensor):
            kept = {"input": [x], "output": [output], "both": [x, output]}[KEPT[name]]
            remember_exact(find_slot(key, x), output.grad_fn, kept)
        return output

    exact.__name__ = exact.__qualname__ = name
    return exact


softmax, log_softmax, sqrt, rsqrt = map(_exact, ("softmax", "log_softmax", "sqrt", "rsqrt"))
reciprocal, log, abs, std, var = map(_exact, ("reciprocal", "log", "abs", "std", "var"))
amax, amin = map(_exact, ("amax", "amin"))
