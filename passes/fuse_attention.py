"""Attention written out (matmul, softmax, matmul) becomes `scaled_dot_product_attention`, which keeps no map.

Equal to rounding, not to the bit, so it is done on request alone. The pattern, in any of the ways to spell it:
softmax over the last dimension of `q @ k^T`, with a constant scale, an additive mask or bias, and dropout as options.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

# Functions by name, whether they are called as functions, as methods or through an operator, and their arguments.
MATMULS = {"matmul": ("input", "other"), "bmm": ("input", "mat2")}
SOFTMAXES = {"softmax": ("input", "dim", "_stacklevel", "dtype")}
ADDS = {name: ("input", "other") for name in ("add", "add_", "iadd")}
PRODUCTS = {name: ("input", "other") for name in ("mul", "mul_", "imul")}
QUOTIENTS = {name: ("input", "other") for name in ("div", "div_", "truediv", "itruediv")}
CASTS = {name: ("input",) for name in ("to", "type_as", "float", "contiguous")}
DROPOUTS = {"dropout": ("input", "p", "training", "inplace")}


class Match(NamedTuple):
    query: fx.Node
    key_transposed: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    dropout: float


def fuse_attention_pass(gm: fx.GraphModule) -> PassResult:
    """Replaces every attention pattern of the graph."""
    found = [(node, match) for node in gm.graph.nodes if (match := _match(node)) is not None]
    for last, match in found:
        with gm.graph.inserting_before(last):
            new = gm.graph.call_function(attention, tuple(match))
        new.meta = last.meta.copy()
        last.replace_all_uses_with(new)
    if found:
        gm.graph.eliminate_dead_code()
    return PassResult(gm, bool(found))


def attention(query: Tensor, key_transposed: Tensor, value: Tensor, mask: Any, scale: float, dropout: float) -> Tensor:
    """What the pattern computes, without a map kept for backward."""
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key_transposed.mT, value, mask, dropout, scale=scale)


def _match(last: fx.Node) -> Match | None:
    outer = _arguments(last, MATMULS)
    if outer is None:
        return None
    probabilities, value = outer.values()
    node, dropout = _only_used_here(probabilities), 0.0
    while node is not None and (_arguments(node, CASTS) or _arguments(node, DROPOUTS)):
        if (called := _arguments(node, DROPOUTS)) is not None:
            p, training = called.get("p", 0.5), called.get("training", True)
            if not isinstance(p, (int, float)) or not isinstance(training, bool):
                return None
            dropout = max(dropout, p if training else 0.0)
        node = _only_used_here(node.args[0])
    softmax = None if node is None else _arguments(node, SOFTMAXES)
    if softmax is None or not _is_last(softmax.get("dim"), softmax["input"]) or softmax.get("dtype") is not None:
        return None
    node, mask, scale = _only_used_here(softmax["input"]), None, 1.0
    if node is not None and (added := _arguments(node, ADDS)) is not None:
        mask = added["other"]
        if not isinstance(mask, fx.Node):
            return None
        node = _only_used_here(added["input"])
    while node is not None:
        product, quotient = _arguments(node, PRODUCTS), _arguments(node, QUOTIENTS)
        scaled = product or quotient
        if scaled is None or not isinstance(scaled["other"], (int, float)):
            break
        scale = scale * scaled["other"] if product else scale / scaled["other"]
        node = _only_used_here(scaled["input"])
    inner = None if node is None else _arguments(node, MATMULS)
    if inner is None or not isinstance(value, fx.Node):
        return None
    query, key_transposed = inner.values()
    return Match(query, key_transposed, value, mask, scale, dropout)


def _arguments(node: fx.Node, functions: dict[str, tuple[str, ...]]) -> dict[str, Any] | None:
    """The arguments of a call by name, however they were given; None if it calls something else."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").strip("_")
    if name not in functions:
        return None
    given = dict(zip(functions[name], node.args, strict=False)) | node.kwargs
    if "self" in given:
        given["input"] = given.pop("self")
    wanted = functions[name][: 2 if functions is not CASTS and functions is not DROPOUTS else 1]
    return given if all(key in given or key == "dim" for key in wanted) else None


def _only_used_here(value: Any) -> fx.Node | None:
    """A node that nobody else reads: what may be left out."""
    return value if isinstance(value, fx.Node) and len(value.users) == 1 else None


def _is_last(dim: Any, x: Any) -> bool:
    shape = getattr(x.meta.get("example_value"), "shape", None) if isinstance(x, fx.Node) else None
    return dim == -1 or (shape is not None and isinstance(dim, int) and dim == len(shape) - 1)
