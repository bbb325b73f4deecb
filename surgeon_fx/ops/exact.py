"""Functions that keep an activation as it is: the native function runs, and whoever prunes the same memory shares it.

A row of `KEPT` says which the function keeps, its input, its output or both. `Config(exact_saves=...)` has what it
keeps rounded, as far as the function stands it: see `rounded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import remember_exact
from surgeon_fx.ops.rounded import rounding_for, run_rounded
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
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor):
            return native(*args, **kwargs)
        slot = find_slot(key, x)
        if rounding_for(slot, name) is not None:
            return run_rounded(slot, name, native, *args, **kwargs)
        output = native(*args, **kwargs)
        if output.grad_fn is not None:
            kept = {"input": [x], "output": [output], "both": [x, output]}[KEPT[name]]
            remember_exact(slot, output.grad_fn, kept)
        return output

    exact.__name__ = exact.__qualname__ = name
    return exact


softmax, log_softmax, sqrt, rsqrt = map(_exact, ("softmax", "log_softmax", "sqrt", "rsqrt"))
reciprocal, log, abs, std, var = map(_exact, ("reciprocal", "log", "abs", "std", "var"))
amax, amin = map(_exact, ("amax", "amin"))
