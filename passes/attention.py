"""Attention written out (matmul, softmax, matmul) becomes `scaled_dot_product_attention`, which keeps no map.

Equal to rounding, not to the bit, so it is done on request alone. The pattern, in any of the ways to spell it:
softmax over the last dimension of `q @ k^T`, with a constant scale, an additive mask or bias, and dropout as options.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

MATMULS = (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm")
SOFTMAXES = (F.softmax, torch.softmax, "softmax")
ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
SCALES = (operator.mul, torch.mul, "mul", operator.truediv, torch.div, "div", operator.itruediv, operator.imul)
DIVISIONS = (operator.truediv, operator.itruediv, torch.div, "div")
CASTS = ("to", "type_as", "float", "contiguous")


def fuse_attention(gm: fx.GraphModule) -> bool:
    """Replaces every attention pattern of the graph."""
    found = [match for node in gm.graph.nodes if (match := _match(gm, node))]
    for last, query, key_transposed, value, mask, scale, dropout in found:
        with gm.graph.inserting_before(last):
            new = gm.graph.call_function(attention, (query, key_transposed, value, mask, scale, dropout))
        new.meta = last.meta
        last.replace_all_uses_with(new)
    if found:
        gm.graph.eliminate_dead_code()
    return bool(found)


def attention(query: Tensor, key_transposed: Tensor, value: Tensor, mask: Any, scale: float, dropout: float) -> Tensor:
    """What the pattern computes, without a map kept for backward."""
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key_transposed.mT, value, mask, dropout, scale=scale)


def _match(gm: fx.GraphModule, last: fx.Node) -> tuple[Any, ...] | None:
    if not _is(last, MATMULS) or len(last.args) != 2:
        return None
    probabilities, value = last.args
    dropout = 0.0
    softmax = _only_use(probabilities)
    while softmax is not None and (_is(softmax, CASTS) or _dropout(gm, softmax) is not None):
        dropout = max(dropout, _dropout(gm, softmax) or 0.0)
        softmax = _only_use(softmax.args[0])
    if softmax is None or not _is_softmax(gm, softmax):
        return None
    node, mask, scale = _only_use(softmax.args[0]), None, 1.0
    if node is not None and _is(node, ADDS) and len(node.args) == 2:
        mask = node.args[1]
        if not isinstance(mask, fx.Node):
            return None
        node = _only_use(node.args[0])
    while node is not None and _is(node, SCALES) and isinstance(node.args[1], (int, float)):
        scale = scale / node.args[1] if node.target in DIVISIONS else scale * node.args[1]
        node = _only_use(node.args[0])
    if node is None or not _is(node, MATMULS) or len(node.args) != 2:
        return None
    return last, node.args[0], node.args[1], value, mask, scale, dropout


def _is(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def _only_use(value: Any) -> fx.Node | None:
    """A node that nobody else reads: what may be left out."""
    return value if isinstance(value, fx.Node) and len(value.users) == 1 else None


def _is_softmax(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        return isinstance(module, nn.Softmax) and module.dim == -1
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return _is(node, SOFTMAXES) and isinstance(dim, int) and dim == -1


def _dropout(gm: fx.GraphModule, node: fx.Node) -> float | None:
    """The probability of a dropout node in the mode the graph was traced in; None for any other node."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        if isinstance(module, nn.Dropout):
            return module.p if gm.training else 0.0
    elif node.op == "call_function" and node.target is F.dropout:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        if isinstance(p, (int, float)) and isinstance(training, bool):
            return float(p) if training else 0.0
    return None
