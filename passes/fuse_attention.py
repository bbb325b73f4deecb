"""Attention written out (matmul, softmax, matmul) becomes `scaled_dot_product_attention`, which keeps no map.

Equal to rounding, not to the bit, so it is done on request alone. The pattern, in any of the ways to spell it:
softmax over the last dimension of `q @ k^T`, with a constant scale, an additive mask or bias, and dropout as options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

# Functions by name, whether they are called as functions, as methods or through an operator, and their arguments.
MATMULS = {"matmul": ("input", "other"), "bmm": ("input", "mat2")}
SOFTMAXES = {"softmax": ("input", "dim", "_stacklevel", "dtype")}
ADDS = dict.fromkeys(("add", "add_", "iadd"), ("input", "other"))
PRODUCTS = dict.fromkeys(("mul", "mul_", "imul"), ("input", "other"))
QUOTIENTS = dict.fromkeys(("div", "div_", "truediv", "itruediv"), ("input", "other"))
CASTS = dict.fromkeys(("to", "type_as", "float", "contiguous"), ("input",))
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
            last.replace_all_uses_with(_attention(gm.graph, match, last))
    if found:
        gm.graph.eliminate_dead_code()
    return PassResult(gm, bool(found))


def _attention(graph: fx.Graph, match: Match, last: fx.Node) -> fx.Node:
    """What the pattern computes, without a map kept for backward."""
    key = _derived(graph, last, "transpose", match.key_transposed, -2, -1)
    mask = match.mask if match.mask is None else _derived(graph, last, "type_as", match.mask, match.query)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": match.dropout, "scale": match.scale}
    new = graph.call_function(F.scaled_dot_product_attention, (match.query, key, match.value), options)
    new.meta = last.meta.copy()
    return new


def _derived(graph: fx.Graph, last: fx.Node, method: str, x: fx.Node, *args: Any) -> fx.Node:
    """A method of a node, with the value that later passes look for and the place of `last`."""
    new = graph.call_method(method, (x, *args))
    values = [_value(one) if isinstance(one, fx.Node) else one for one in (x, *args)]
    new.meta = last.meta.copy()
    new.meta["example_value"] = None if values[0] is None else getattr(values[0], method)(*values[1:])
    return new


def _match(last: fx.Node) -> Match | None:
    outer = _arguments(last, MATMULS)
    if outer is None:
        return None
    probabilities, value = _operands(outer)
    node, dropout = _only_used_here(probabilities), 0.0
    while node is not None and (_arguments(node, CASTS) or _arguments(node, DROPOUTS)):
        if (called := _arguments(node, DROPOUTS)) is not None:
            p, training = called.get("p", 0.5), called.get("training", True)
            if not isinstance(p, (int, float)) or not isinstance(training, bool):
                return None
            dropout = max(dropout, p if training else 0.0)
        node = _only_used_here((_arguments(node, CASTS) or _arguments(node, DROPOUTS) or {}).get("input"))
    softmax = None if node is None else _arguments(node, SOFTMAXES)
    if softmax is None or not _is_last(softmax.get("dim"), softmax["input"]):
        return None
    if softmax.get("dtype") is not None or not isinstance(softmax.get("_stacklevel", 3), int):  # another precision
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
    query, key_transposed = _operands(inner)
    if not _batches_alike(query, key_transposed, value):
        return None
    return Match(query, key_transposed, value, mask, scale, dropout)


def _arguments(node: fx.Node, functions: Mapping[str, tuple[str, ...]]) -> dict[str, Any] | None:
    """The arguments of a call by name, however they were given; None if it calls something else."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").strip("_")
    if name not in functions:
        return None
    given = dict(zip(functions[name], node.args, strict=False)) | node.kwargs
    others = [value for key, value in node.kwargs.items() if key not in functions[name]]
    if functions is not CASTS and any(value not in (None, 1) for value in others):
        return None  # an option that changes what is computed
    wanted = functions[name][: 2 if functions is not CASTS and functions is not DROPOUTS else 1]
    return given if all(key in given or key == "dim" for key in wanted) else None


def _only_used_here(value: Any) -> fx.Node | None:
    """A node that nobody else reads: what may be left out."""
    return value if isinstance(value, fx.Node) and len(value.users) == 1 else None


def _operands(product: dict[str, Any]) -> tuple[Any, Any]:
    return product["input"], product["other"] if "other" in product else product["mat2"]


def _value(x: Any) -> Any:
    """An example of what a node computes, if it was captured with one."""
    return x.meta.get("example_value") if isinstance(x, fx.Node) else None


def _batches_alike(*operands: Any) -> bool:
    """Whether attention takes these: batches of matrices that need not be broadcast."""
    shapes: list[Any] = [getattr(_value(x), "shape", None) for x in operands]
    return None in shapes or len({tuple(shape[:-2]) for shape in shapes}) == 1


def _is_last(dim: Any, x: Any) -> bool:
    shape = getattr(_value(x), "shape", None)
    return dim == -1 or (shape is not None and isinstance(dim, int) and dim == len(shape) - 1)
