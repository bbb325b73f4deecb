"""Fuse pools: ReLU and the max pool that alone reads its output become one operation, which keeps no bits of the ReLU.

Every value and gradient stays as it is, so the pass needs no flag.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.registry import rule_for
from surgeon_fx.passes.tag_saves import saving_of

POOLS = ("max_pool1d", "max_pool2d", "max_pool3d")
FRESH = ("conv", "linear", "norm")  # families whose result nobody else can see before the ReLU changes it in place


def fuse_pools_pass(gm: fx.GraphModule) -> PassResult:
    changed = False
    for node in list(gm.graph.nodes):
        changed |= _is_pool(node) and _fuse(gm.graph, node)
    return PassResult(gm, changed)


def _fuse(graph: fx.Graph, pool: fx.Node) -> bool:
    rectify = pool.args[0] if pool.args else None
    if not isinstance(rectify, fx.Node) or list(rectify.users) != [pool]:
        return False
    found = _relu(rectify)
    if found is None:
        return False
    x, in_place = found
    if in_place and not (list(x.users) == [rectify] and (made := saving_of(x)) is not None and made.rule in FRESH):
        return False
    rule, saving = rule_for(pool.target), saving_of(pool)
    assert rule is not None
    assert saving is not None
    pool.op, pool.target = "call_function", rule.op
    pool.args = (saving.key, x, *pool.args[1:])
    pool.kwargs = {**pool.kwargs, "rectify": "relu_" if in_place else "relu"}
    graph.erase_node(rectify)
    return True


def _is_pool(node: fx.Node) -> bool:
    rule = rule_for(node.target) if saving_of(node) is not None else None
    return rule is not None and rule.op.__name__ in POOLS and not _argument(node, 6, "return_indices")


def _relu(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """What a ReLU reads, and whether it changes it in place; None if the node is none."""
    rule = rule_for(node.target) if saving_of(node) is not None else None
    name = "" if rule is None else rule.op.__name__
    x = node.args[0] if node.args else None
    if name not in ("relu", "relu_") or not isinstance(x, fx.Node):
        return None
    return x, name == "relu_" or bool(_argument(node, 1, "inplace"))


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
