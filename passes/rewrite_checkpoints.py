"""Checkpointed regions: Dynamo leaves a mark for compilers that recompute by themselves; here they run as in eager.

The body of a region is a graph of its own and is rewritten like any other: in the first forward autograd drops what it
saves, in backward it runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import checkpoint

from surgeon_fx.passes.tag_saves import Layers


def rewrite_checkpoints_pass(
    gm: fx.GraphModule, layers: Layers, rewrite_body: Callable[[fx.GraphModule, Layers], Any]
) -> PassResult:
    changed = False
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        body_node, *outside = node.args
        body: Any = gm.get_submodule(str(body_node.target))
        inside = [one for one in body.graph.nodes if one.op == "placeholder"]
        pairs = [pair for pair in zip(inside, outside, strict=True) if isinstance(pair[1], fx.Node)]
        parameters = {one: layers.parameters[given] for one, given in pairs if given in layers.parameters}
        buffers = {one for one, given in pairs if given in layers.buffers}
        rewrite_body(body, replace(layers, parameters=parameters, buffers=buffers))
        own = tuple(i for i, given in enumerate(outside) if given in layers.parameters or given in layers.buffers)
        node.target, node.args = run_checkpointed, (body_node, own, *outside)
        changed = True
    return PassResult(gm, changed)


def run_checkpointed(body: fx.GraphModule, own: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """What the region was before it was captured.

    Arguments that are the model's own, at the places `own`, are not inputs of the region: a batch norm counts batches
    in one of them.
    """
    fixed = {i: args[i] for i in own}

    def region(*inputs: Any) -> Any:
        given = iter(inputs)
        return body(*(fixed[i] if i in fixed else next(given) for i in range(len(args))))

    inputs = (x for i, x in enumerate(args) if i not in fixed)
    return checkpoint(region, *inputs, **{**options, "use_reentrant": False})
