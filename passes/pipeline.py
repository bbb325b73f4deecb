"""The passes, in their order. A pass takes a graph module, changes its graph, and says whether it did."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from surgeon_fx.config import Config
from surgeon_fx.passes.attention import fuse_attention
from surgeon_fx.passes.functions import rewrite_functions

Pass = Callable[[fx.GraphModule], bool]


def passes_for(config: Config) -> tuple[Pass, ...]:
    return (*((fuse_attention,) if config.fuse_attention else ()), rewrite_functions)


def rewrite(gm: fx.GraphModule, passes: tuple[Pass, ...]) -> fx.GraphModule:
    """Runs the passes and compiles what they made."""
    changed = [run(gm) for run in passes]
    if any(changed):
        gm.graph.lint()
        gm.recompile()
    return gm
