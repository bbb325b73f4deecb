"""What a native function keeps as it is, kept in fewer bits: `Config(exact_saves="int8" | "bf16")`.

Saved-tensor hooks around the native call, and around nothing else: its forward is untouched, and so is its backward,
which is given activations that were rounded. Parameters, buffers, statistics and small tensors pass. What other hooks
are in place (checkpointing, `save_on_cpu`) is handed the rounded tensors in turn.

Reference: the native gradients, with each activation that the function keeps replaced by its rounded self. In 8 bits
that is right for products: the error is a share of the largest element around. A function that divides by what it keeps
or compares it must be vouched for, see `ROUNDS`; any other keeps bfloat16, in which nothing becomes zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from surgeon_fx.kernels.layout import is_dense, unflatten
from surgeon_fx.ops.common import is_parameter
from surgeon_fx.ops.keep import ROUNDINGS, Record, can_round, refuse_double_backward, round_save, unround
from surgeon_fx.ops.slots import Slot, make_note, slot_behind

NOTE = "surgeon_fx_note"  # on a rounded tensor, while somebody looks on: what it stands for

# By name, the most that a function's saves may be rounded. Those that compare what they keep do not stand any.
ROUNDS: dict[str, str | None] = {
    **dict.fromkeys(("scaled_dot_product_attention", "softmax", "var"), "int8"),
    **dict.fromkeys(("matmul", "mm", "bmm", "baddbmm", "addbmm", "einsum", "bilinear", "tensordot", "dot"), "int8"),
    **dict.fromkeys(("amax", "amin", "max", "min", "maximum", "minimum", "fmax", "fmin", "aminmax"), None),
    **dict.fromkeys(
        ("median", "mode", "kthvalue", "topk", "sort", "cummax", "cummin", "renorm", "dist", "cdist"), None
    ),
}


# Functions that save no activation, which are most of the others: not worth the hooks.
SAVES_NOTHING = frozenset(
    (
        *("add", "iadd", "radd", "sub", "isub", "rsub", "neg", "getitem", "view", "reshape", "flatten", "unflatten"),
        *("transpose", "permute", "swapaxes", "movedim", "t", "mT", "contiguous", "clone", "detach", "to", "type"),
        *(
            "type_as",
            "float",
            "half",
            "bfloat16",
            "double",
            "chunk",
            "split",
            "unbind",
            "expand",
            "expand_as",
            "repeat",
        ),
        *("cat", "concat", "stack", "squeeze", "unsqueeze", "roll", "flip", "narrow", "select", "pad", "mean", "sum"),
        *("interpolate", "upsample", "size", "dim", "numel", "get"),
    )
)


def may_save(function: Any) -> bool:
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return name.strip("_") not in SAVES_NOTHING


class Rounded(NamedTuple):
    """What is held in place of an activation."""

    first: Any  # codes or bfloat16; the activation itself where somebody keeps it exactly
    second: Any
    layout: Layout


class Layout:
    """Of the activation. Not a tuple: autograd's graph is searched for tensors, and there are none in here."""

    def __init__(self, x: Tensor, record: Record, hooks: Any) -> None:
        self.shape, self.dtype, self.record, self.hooks = x.shape, x.dtype, record, hooks
        self.stride = x.stride() if is_dense(x) else torch.empty(x.shape, device="meta").stride()


Packed = Any  # a Rounded, a Passed or a Remade
Amend = Callable[[Tensor, Packed], Packed]  # a function's say in how one of its saves is kept


class Remade(NamedTuple):
    """What a function keeps, and what backward is given for it."""

    packed: Packed
    make: Callable[[], Tensor]


class Passed(NamedTuple):
    """A tensor that stays as it is, and its version, which autograd does not check behind hooks."""

    tensor: Any
    version: int
    hooks: Any


def rounding_for(slot: Slot, name: str) -> str | None:
    """How far a function's saves are rounded: as the model's config says, or less."""
    wanted = slot.group.exact_saves
    most = ROUNDS.get(name, "bf16")
    return None if wanted is None or most is None else max(wanted, most, key=ROUNDINGS.index)


def run_rounded(slot: Slot, name: str, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The native function; what its own autograd nodes keep of activations is rounded."""
    return run_amended(slot, name, native, None, None, *args, **kwargs)


def run_amended(
    slot: Slot,
    name: str,
    native: Callable[..., Any],
    stays: Callable[[Tensor], bool] | None,
    amend: Amend | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same, but for saves that `stays` wants exact; `amend` sees all that is kept, in the function's order."""
    rounding = rounding_for(slot, name)
    if rounding is None or not torch.is_grad_enabled():
        return native(*args, **kwargs)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(x: Tensor) -> Packed:
        packed = pack_alone(x)
        return packed if amend is None else amend(x, packed)

    def pack_alone(x: Tensor) -> Packed:
        exact = stays is not None and stays(x)
        if exact or x.grad_fn is None or is_parameter(x) or not can_round(x, rounding):
            return Passed(_hand_on(hooks, x.detach()), x._version, hooks)
        first, second, record = round_save(x, rounding)
        if slot.group.observed:
            setattr(first, NOTE, make_note(slot, rounding, x))
        return Rounded(_hand_on(hooks, first), _hand_on(hooks, second), Layout(x, record, hooks))

    with saved_tensors_hooks(pack, unpack):
        return native(*args, **kwargs)


def run_unknown(key: str, /, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that the registry does not know, or a tensor's method given by its name."""
    native = getattr(Tensor, function) if isinstance(function, str) else function
    return run_rounded(slot_behind(key), getattr(native, "__name__", ""), native, *args, **kwargs)


@cache
def rounded_version(function: Any) -> Callable[..., Any]:
    """`run_unknown` of one function, as a node of a graph wants it."""

    def run(key: str, /, *args: Any, **kwargs: Any) -> Any:
        return run_unknown(key, function, *args, **kwargs)

    name = function if isinstance(function, str) else function.__name__
    run.__name__ = run.__qualname__ = f"rounded_{name.strip('_')}"
    return run


def _hand_on(hooks: Any, x: Tensor) -> Any:
    return x if hooks is None else hooks[0](x)


def _take_back(hooks: Any, x: Any) -> Any:
    return x if hooks is None else hooks[1](x)


def unpack(packed: Packed) -> Tensor:
    if isinstance(packed, Remade):
        return packed.make()
    if isinstance(packed, Passed):
        x = _take_back(packed.hooks, packed.tensor)
        if packed.hooks is None and x._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {packed.version}"
            )
        return x
    refuse_double_backward()
    layout = packed.layout
    first, second = _take_back(layout.hooks, packed.first), _take_back(layout.hooks, packed.second)
    return unflatten(unround(first, second, layout.dtype), layout.shape, layout.stride)
