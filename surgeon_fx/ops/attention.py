"""Attention: q, k, v and the output stay whole, the projections around them are linear layers.

Reference: the native functions themselves, over rounded activations where `Config(exact_saves=...)` asks for it.
`F.multi_head_attention_forward` is Python over others, which are substituted one by one.
"""

from __future__ import annotations

import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import remember_exact
from surgeon_fx.ops.rounded import run_rounded
from surgeon_fx.ops.slots import find_key, find_slot

OUT_PROJECTION = 11  # the place of its weight among the arguments


def scaled_dot_product_attention(
    layer: str, /, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """No map is kept. Whoever prunes one of the four tensors that are kept, rounded or not, shares it instead.

    Where torch has no kernel (a mask that needs a gradient), it writes attention out, over scaled copies of q and k.
    """
    native, slot = F.scaled_dot_product_attention, find_slot(layer, query)
    if slot.group.exact_saves is not None:
        return run_rounded(slot, native.__name__, native, query, key, value, *args, **kwargs)
    output = native(query, key, value, *args, **kwargs)
    if output.grad_fn is not None:
        fused = "ScaledDotProduct" in output.grad_fn.name()
        remember_exact(slot, output.grad_fn, [query, key, value, output] if fused else [value])
    return output


def multi_head_attention_forward(layer: str, /, *args: Any, **kwargs: Any) -> Any:
    from surgeon_fx.ops.interpreter import Interpreter  # which is made of the registry, and so of this

    last = args[OUT_PROJECTION] if len(args) > OUT_PROJECTION else kwargs.get("out_proj_weight")
    last_layer = find_key(f"{layer}.out_proj", otherwise=layer)

    def owner(parameter: Tensor) -> str:
        return last_layer if parameter is last else layer

    with Interpreter(layer, owner):
        return _inside(*args, **kwargs)


def _without_overrides(function: Any) -> Any:
    """The same Python, not asking for overrides at its top: what it calls does."""
    unasked = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        function.__code__,
        function.__globals__ | unasked,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_inside = _without_overrides(F.multi_head_attention_forward)
