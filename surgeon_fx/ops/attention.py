"""Attention: q, k, v and the output stay whole, the projections around them are linear layers.

Reference: the native functions themselves, over rounded activations where `Config(exact_saves=...)` asks for it.
`F.multi_head_attention_forward` is Python over others, which are substituted one by one.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import remember_exact
from surgeon_fx.ops.rounded import Packed, Remade, run_amended, unpack
from surgeon_fx.ops.slots import Slot, find_key, find_slot

OUT_PROJECTION = 11  # the place of its weight among the arguments


def scaled_dot_product_attention(
    layer: str, /, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """No map is kept. Whoever prunes one of the four tensors that are kept, rounded or not, shares it instead.

    Where torch has no kernel (a mask that needs a gradient), it writes attention out, over scaled copies of q and k.
    """
    native, slot = F.scaled_dot_product_attention, find_slot(layer, query)
    if slot.group.exact_saves is not None:
        return _rounded(slot, query, key, value, *args, **kwargs)
    output = native(query, key, value, *args, **kwargs)
    if output.grad_fn is not None:
        fused = "ScaledDotProduct" in output.grad_fn.name()
        remember_exact(slot, output.grad_fn, [query, key, value, output] if fused else [value])
    return output


def _rounded(
    slot: Slot,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **rest: Any,
) -> Tensor:
    """Backward makes the map anew, as exp(q k - logsumexp): the logsumexp must be that of the q and k it is given.

    With that of the unrounded ones a row would no longer sum to one, and grow without bound with its logits. On a CPU
    it is worked out anew, with the output. Elsewhere kernels have layouts of their own for it: q and k stay exact.
    """
    native, name = F.scaled_dot_product_attention, F.scaled_dot_product_attention.__name__
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    row_shape = query.shape[:-1]  # autograd keeps the functions below: they may hold no activation
    if not query.is_cpu:
        output_shape, of_value, of_others = (*row_shape, value.shape[-1]), id(value), (id(query), id(key))

        def stays(x: Tensor) -> bool:
            return id(x) != of_value and (id(x) in of_others or x.shape != output_shape)

        return run_amended(slot, name, native, stays, None, *arguments, scale=scale, **rest)
    saves = _Saves(is_causal, scale)

    def amend(x: Tensor, packed: Packed) -> Packed:
        return saves.add(packed, x.grad_fn is None and x.shape == row_shape)

    return run_amended(slot, name, native, None, amend, *arguments, scale=scale, **rest)


class _Saves:
    """Of torch's fused attention on a CPU: a mask if there is one, key, query, value, logsumexp and output.

    Each is unpacked once in a backward, as checkpointing demands: with the first of them the last two are made.
    """

    def __init__(self, is_causal: bool, scale: float | None) -> None:
        self.is_causal, self.scale = is_causal, scale
        self.packed: list[Packed] = []
        self.first_made: int | None = None  # the logsumexp's place, where there is one
        self.found: dict[int, Tensor] = {}

    def add(self, packed: Packed, may_be_logsumexp: bool) -> Packed:
        place = len(self.packed)
        self.packed.append(packed)
        if may_be_logsumexp and self.first_made is None and place in (3, 4):
            self.first_made = place
        return Remade(packed, partial(self._hand_out, place))

    def _hand_out(self, place: int) -> Tensor:
        if self.first_made is None:
            return unpack(self.packed[place])
        if place not in self.found:
            self.found = {i: unpack(one) for i, one in enumerate(self.packed[: self.first_made])}
            *mask, key, query, value = self.found.values()
            run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            given = {"attn_mask": mask[0] if mask else None, "scale": self.scale}
            output, logsumexp = run(query, key, value, 0.0, self.is_causal, **given)
            self.found |= {self.first_made: logsumexp, self.first_made + 1: output}
        return self.found.pop(place)


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
