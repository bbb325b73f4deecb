"""What a real step takes, to hold a plan against: live bytes by the events of torch's own CPU allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

OPERATIONS = ("aten::", "surgeon_fx::")


def measured_peak(model: nn.Module, *inputs: Any, **named_inputs: Any) -> tuple[int, int]:
    """Peak of one real step with gradients already there: between operations, and inside them.

    The first counts what operations hand to each other, which is what a plan predicts; the second has the scratch of
    the libraries on top. The step before it is not counted: it makes gradients and warms up.
    """
    _step(model, inputs, named_inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        _step(model, inputs, named_inputs)
    events = list(run.profiler.kineto_results.events())
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    operations = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith(OPERATIONS)
    )
    ends: list[int] = []  # of operations that are not part of another
    for _, end in operations:
        if not ends or end > ends[-1]:
            ends.append(end)
    between = inside = live = position = 0
    for end in ends:
        while position < len(changes) and changes[position][0] <= end:
            live += changes[position][1]
            inside = max(inside, live)
            position += 1
        between = max(between, live)
    return between, inside


def _step(model: nn.Module, inputs: Any, named_inputs: Any) -> None:
    outputs = [x for x in tree_leaves(model(*inputs, **named_inputs)) if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
