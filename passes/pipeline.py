"""The passes, in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.config import Config
from surgeon_fx.passes.fuse_attention import fuse_attention_pass
from surgeon_fx.passes.fuse_pools import fuse_pools_pass
from surgeon_fx.passes.join_early import join_early_pass
from surgeon_fx.passes.rewrite_checkpoints import rewrite_checkpoints_pass
from surgeon_fx.passes.rewrite_saves import rewrite_saves_pass
from surgeon_fx.passes.round_saves import round_saves_pass
from surgeon_fx.passes.share_saves import share_saves_pass
from surgeon_fx.passes.tag_saves import Layers, saving_of, tag_saves_pass

Pass = Callable[[fx.GraphModule], PassResult]


def passes_for(layers: Layers, config: Config) -> tuple[Pass, ...]:
    return (
        *((fuse_attention_pass,) if config.fuse_attention else ()),  # changes rounding: on request
        partial(rewrite_checkpoints_pass, layers=layers, rewrite_body=partial(run_passes, config=config)),
        partial(tag_saves_pass, layers=layers),
        fuse_pools_pass,
        *((share_saves_pass,) if config.share_saves else ()),  # changes gradients: on request
        rewrite_saves_pass,
        *((partial(round_saves_pass, layers=layers),) if config.exact_saves else ()),
        join_early_pass,
    )


def run_passes(gm: fx.GraphModule, layers: Layers, config: Config) -> dict[str, int]:
    """Runs the passes over a captured graph, in place. Returns how many nodes each rule took."""
    changed = [run(gm).modified for run in passes_for(layers, config)]
    if any(changed):
        gm.graph.lint()
        gm.recompile()
    counts: dict[str, int] = {}
    for node in gm.graph.nodes:
        if (saving := saving_of(node)) is not None:
            counts[saving.rule] = counts.get(saving.rule, 0) + 1
    return counts
