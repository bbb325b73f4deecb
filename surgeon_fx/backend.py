"""`torch.compile(model, backend="surgeon_fx")`: the second door to the compiler.

`surgeon_fx.ratios(compiled)` gives the table of ratios by layer; what was captured before that is captured again.
Without it every layer runs at one ratio, `torch.compile(..., options={"ratio": 0.9})`, by default 0: exact.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from surgeon_fx.config import Config
from surgeon_fx.distributed import gathers_weights
from surgeon_fx.kernels.layout import check_ratio
from surgeon_fx.modules import is_layer
from surgeon_fx.passes.capture import Backend
from surgeon_fx.runtime import Rewrite

DOOR = "_surgeon_fx_door"  # where a model that is compiled with this backend keeps its Rewrite

log = logging.getLogger("surgeon_fx")

_doors: weakref.WeakSet[Rewrite] = weakref.WeakSet()
_without_table: dict[int, weakref.ref[Tensor]] = {}  # parameters of graphs that were captured without a table


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """What `torch.compile` calls with each graph."""
    given = dict(options or {})
    ratio = check_ratio(given.pop("ratio", 0.0))
    if given:
        raise ValueError(f"backend 'surgeon_fx' has the option 'ratio', got {', '.join(map(repr, given))}")
    parameters: dict[int, weakref.ref[Tensor]] = {
        id(x): weakref.ref(x) for x in example_inputs if isinstance(x, nn.Parameter)
    }
    rewrite = next((one for one in _doors if any(id(p) in parameters for p in one.module.parameters())), None)
    if rewrite is None:
        _without_table.update(parameters)
        rewrite = Rewrite(nn.Module(), {}, set(), Config())
        rewrite.slots.default = ratio
    elif ratio:
        rewrite.table.fill(ratio)
    rewrite.slots.gathers |= gathers_weights(rewrite.module if rewrite in _doors else None)
    return Backend(rewrite)(gm, example_inputs)


def open_door(compiled: nn.Module) -> Rewrite | None:
    """The state of a model that was compiled with this backend; None for any other."""
    original = compiled.__dict__.get("_modules", {}).get("_orig_mod")
    context = getattr(compiled, "dynamo_ctx", None)
    if original is None or not _is_ours(getattr(context, "callback", None)):
        return None
    if DOOR not in original.__dict__:
        layers = {name: module for name, module in original.named_modules() if is_layer(module)}
        original.__dict__[DOOR] = Rewrite(original, layers, set(), Config())
        _doors.add(original.__dict__[DOOR])
        if any((known := _without_table.get(id(p))) is not None and known() is p for p in original.parameters()):
            log.info("graphs that have no table are captured again: Dynamo forgets all it has captured")
            torch._dynamo.reset()
            _without_table.clear()
    return original.__dict__[DOOR]


def _is_ours(backend: Any) -> bool:
    """Whether our function is what torch's wrappers around a backend end in."""
    while backend is not None and backend is not compile_graph:
        backend = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
    return backend is compile_graph
