"""One save for a chain: `Config(share_saves=True)`.

norm -> activation -> conv or linear keeps the pruned x-hat of the norm, and for ReLU its bits. The input of the layer
is rebuilt from it: act(x-hat * weight + bias) at the places that the norm kept, zero elsewhere. So is what a smooth
activation between the two reads; one that is behind no norm keeps its input for the layer behind it. What is kept is
kept at the lowest ratio of those it serves.

norm -> sum -> activation -> conv or linear, the end of a residual block: the layer's input is kept at the places that
the norm kept, where both keep as many, so that one bitmask serves both.

Reference: the gradients of each operation, its activation replaced by the rebuilt one. `passes/share_saves.py` says
where; a chain that turns out otherwise when it runs (other memory, a ratio of 0) keeps each save for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import is_parameter
from surgeon_fx.ops.keep import Kept, Share, find_places, find_share, offer, offer_places
from surgeon_fx.ops.slots import Slot, slot_behind

# Activations, element by element, of the input alone. Those that keep their input can start a chain.
STARTS = ("gelu", "silu", "hardswish", "mish", "softplus", "elu", "celu", "selu")
SUMS = ("add", "iadd", "radd")
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu_": torch.relu_,
    **{name: getattr(F, name) for name in (*STARTS, "relu", "relu6", "leaky_relu", "leaky_relu_", "hardtanh")},
}


def is_sum(function: Any, args: Sequence[Any]) -> bool:
    """Whether a call adds two tensors."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return name.strip("_") in SUMS and len(args) > 1 and all(isinstance(x, Tensor) for x in args[:2])


def offer_affine(slot: Slot, output: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int) -> Tensor:
    """What a norm keeps serves whoever prunes its output; weight and bias go along `dim`, or along the last dimensions.

    A computed weight is not held on to for that.
    """
    kept: tuple[Kept, ...] = getattr(output.grad_fn, "kept", ())
    given = [x for x in (weight, bias) if x is not None]
    if not slot.offers or not kept or not all(map(is_parameter, given)):
        return output
    run = output.stride(dim)
    if given and given[0].dim() > 1:
        if not output.is_contiguous():
            return output
        run = 1
    elif given and given[0].numel() == 1:  # any stride goes with a single channel
        run = 1
    if (share := _share_of(kept[0], slot, output)) is not None:
        if slot.group.gathers:
            weight, bias = (None if x is None else x.detach().clone() for x in (weight, bias))
        offer(output, replace(share, run=run, weight=weight, bias=bias))
    return output


def _share_of(kept: Kept, slot: Slot, output: Tensor) -> Share | None:
    """What was kept, for an output that lies in memory as it did."""
    pair = None if kept.record is None else kept.record.saved()
    if pair is None or not kept.dense_layout or kept.stride != output.stride():
        return None
    first, second = map(weakref.ref, pair)
    assert kept.record is not None
    source = (slot.name, *slot.sharers)
    return Share(first, second, kept.dtype, output.numel(), kept.record.ratio, source)


@cache
def handing_on(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An activation whose output can be rebuilt from what its input is, or from what it keeps of its input."""
    native = ACTIVATIONS[op.__name__]

    def run(key: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        share, places, stride, slot = find_share(input), find_places(input), input.stride(), slot_behind(key)
        output = op(key, input, *args, **kwargs)
        kept: tuple[Kept, ...] = getattr(output.grad_fn, "kept", ())
        if share is None and slot.offers and kept and kept[0].share is None:
            share = _share_of(kept[0], slot, output)
        if share is not None and output.stride() == stride:
            functions = (*share.functions, lambda x: native(x, *args, **kwargs))
            offer(output, replace(share, functions=functions))
        if places is not None and output.stride() == stride:
            offer_places(output, places)
        return output

    run.__name__ = run.__qualname__ = f"handing_on_{op.__name__}"
    return run


@cache
def adding(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A sum of two activations. What is kept of the one that a norm made tells where to keep the sum."""

    def run(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = [(share, x.stride()) for x in (left, right) if (share := find_share(x)) and not share.functions]
        output = function(left, right, *args, **kwargs)
        for share, stride in found[:1]:
            if output.numel() == share.numel and output.stride() == stride and output.dtype == share.dtype:
                offer_places(output, share)
        return output

    run.__name__ = run.__qualname__ = f"adding_{function.__name__}"
    return run
