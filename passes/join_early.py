"""Join early: a concatenation takes each part when it is made, so that its parts do not all wait beside the result.

Where several large parts are made for one `torch.cat` alone, as the branches of a segmentation head are, the peak of
forward has them and the result: twice the bytes. Copied one by one they are there one at a time.
Every value stays as it is, so the pass needs no flag.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops import join, registry
from surgeon_fx.passes.share_saves import VIEWS
from surgeon_fx.passes.tag_saves import function_name

LEAST_BYTES = 1 << 20  # of a result: a smaller one is not what a peak is made of
NEAR = 64  # nodes between the first part and the concatenation, while the whole result is already there
CATS = (torch.cat, torch.concat, torch.concatenate)
# Functions whose result is new memory. Rewritten operations are looked up by the functions of their rules.
FRESH = {F.interpolate, torch.add, operator.add, *CATS, join.join}
FRESH |= {rule.op for rule in registry.RULES.values() if rule.family in ("conv", "linear", "norm")}
IN_PLACE = {rule.op for rule in registry.RULES.values() if rule.family in ("relu", "smooth")}  # where they are asked to


def join_early_pass(gm: fx.GraphModule) -> PassResult:
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in CATS:
            changed |= _rewrite(gm.graph, node)
    return PassResult(gm, changed)


def _rewrite(graph: fx.Graph, node: fx.Node) -> bool:
    parts, dim = _arguments(node)
    result = node.meta.get("example_value")
    values = [x for part in parts if isinstance(x := part.meta.get("example_value"), Tensor)]
    if not isinstance(dim, int) or not isinstance(result, Tensor) or len(values) < len(parts):
        return False
    if any((x.dtype, x.dim()) != (result.dtype, result.dim()) for x in values):  # torch.cat skips empty vectors
        return False
    dim %= result.dim()
    sizes: list[int] = [x.shape[dim] for x in values]
    if not all(isinstance(size, int) for size in sizes) or not _is_large(result) or not result.requires_grad:
        return False
    order = {one: i for i, one in enumerate(graph.nodes)}
    early = {part for part in parts if _is_made_for(part, node) and order[node] - order[part] <= NEAR}
    if len(early) < 2 or len(set(parts)) < len(parts):
        return False
    starts = [sum(sizes[:i]) for i in range(len(parts))]
    ahead = sorted(zip(parts, starts, strict=True), key=lambda pair: order[pair[0] if pair[0] in early else node])
    joined: fx.Node | None = None
    for part, start in ahead:
        with graph.inserting_after(part) if part in early else graph.inserting_before(node):
            if joined is None:
                joined = graph.call_function(join.begin_join, (part, dim, start, sum(sizes)))
            else:
                joined = graph.call_function(join.join, (joined, part, dim, start))
        joined.meta = dict(node.meta)
    assert joined is not None
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
    return True


def _arguments(node: fx.Node) -> tuple[list[fx.Node], Any]:
    """The tensors and the dimension of a concatenation, however it is spelled."""
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    parts, dim = given.get("tensors", ()), given.get("dim", given.get("axis", 0))
    if "out" in given or not isinstance(parts, (list, tuple)) or not all(isinstance(x, fx.Node) for x in parts):
        return [], None
    return list(parts), dim


def _is_made_for(part: fx.Node, node: fx.Node) -> bool:
    """Whether nobody but `node` can see the memory of a part, so that it may be read at once and then forgotten."""
    reader = node
    while set(part.users) == {reader}:
        if part.target in FRESH:
            return True
        first = next((x for x in part.args if isinstance(x, fx.Node)), None)
        if first is None or not (function_name(part) in VIEWS or part.target in IN_PLACE):
            return False
        part, reader = first, part
    return False


def _is_large(x: Tensor) -> bool:
    """By the sizes it was captured with, where they may change."""
    numel = 1
    for size in x.shape:
        hint = size if isinstance(size, int) else size.node.hint
        if hint is None:
            return False
        numel *= hint
    return numel * x.element_size() >= LEAST_BYTES
