"""Rewrite: every tagged node becomes the sparse-saving operation of its rule."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.registry import rule_for
from surgeon_fx.ops.share import handing_on
from surgeon_fx.passes.tag_saves import saving_of


def rewrite_saves_pass(gm: fx.GraphModule) -> PassResult:
    changed = False
    for node in gm.graph.nodes:
        saving = saving_of(node)
        if saving is None or (rule := rule_for(node.target)) is None:
            continue
        node.op, node.target = "call_function", handing_on(rule.op) if saving.hands_on else rule.op
        node.args = (saving.key, *node.args)
        changed = True
    return PassResult(gm, changed)
