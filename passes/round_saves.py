"""Functions that no rule knows keep their activations rounded: `Config(exact_saves=...)`. Runs after the rewrite."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.rounded import may_save, rounded_version
from surgeon_fx.passes.tag_saves import Layers, requires_grad


def round_saves_pass(gm: fx.GraphModule, layers: Layers) -> PassResult:
    changed = False
    for node in gm.graph.nodes:
        if _is_native(node) and may_save(node.target) and requires_grad(node):
            node.op, node.target = "call_function", rounded_version(node.target)
            node.args = (layers.none, *node.args)
            changed = True
    return PassResult(gm, changed)


def _is_native(node: fx.Node) -> bool:
    """Whether a node calls a function of torch's or an operator, and not ours or one that runs a graph."""
    if node.op == "call_method":
        return True
    module = getattr(node.target, "__module__", "") or ""
    return node.op == "call_function" and module.split(".")[0] in ("torch", "_operator", "math")
