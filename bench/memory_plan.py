"""Memory of every way to adapt a model, from shapes alone: the paper's count, what backward holds, and the peak.

    python bench/memory_plan.py --model segformer_b5
    python bench/memory_plan.py --model resnet50 --batch 16 --budget 512MiB --html plan.html
    python bench/memory_plan.py --all-paper
    python bench/memory_plan.py --model resnet20_cifar --verify

Nothing is allocated but for `--verify`, which runs the real thing. `surgeon-fx plan` has the other options but
`--all-paper`, and leaves out the paper's figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common import MIB
from paper_figures import PUBLISHED, all_paper
from tabulate import tabulate
from torch import Tensor, nn

import surgeon_fx
from surgeon_fx import plan
from surgeon_fx.commands import Parser, answer, leave
from surgeon_fx.modules import trains
from surgeon_fx.planner import methods
from surgeon_fx.planner.measure import measured_peak
from surgeon_fx.retained import retained_bytes

VERIFY_BYTES = 512 * MIB  # about what a step of --verify may keep


def shape_that_fits(shape: Sequence[int], saved_bytes: int) -> tuple[int, ...]:
    """A smaller input of about VERIFY_BYTES: fewer images, two at the least, then smaller ones."""
    batch, *rest = shape
    each = saved_bytes / max(batch, 1)
    batch = min(batch, max(2, int(VERIFY_BYTES / max(each, 1))))
    while each * batch > VERIFY_BYTES and min(rest[-2:]) >= 128:
        rest[-2:] = [size // 2 // 32 * 32 for size in rest[-2:]]
        each /= 4
    return (batch, *rest)


def verify(name: str, shape: Sequence[int], dtype: torch.dtype, saved_bytes: int, static: Sequence[float]) -> int:
    """Runs the real thing against the plan: 0 where saved bytes are the same integers and peaks lie within 3 %.

    The measured peak is of torch's CPU allocator, between operations: without the scratch of libraries.
    """
    small = shape_that_fits(shape, saved_bytes)
    model = methods.build(name, dtype, real=True)
    x = torch.randn(small).to(dtype)
    study = methods.Study(model, x)
    cases: list[tuple[str, nn.Module, str, Any]] = [
        ("TENT, norm layers", model, "norm", None),
        ("full tuning", model, "all", None),
        *((f"static {100 * ratio:g} %", study.rewritten, "all", ratio) for ratio in static),
        ("SURGEON, by memory term", study.rewritten, "all", study.memory_ratios()),
    ]
    rows, agrees = [], True
    for title, which, train, used in cases:
        predicted = plan(which, x, ratios=used, train=train)
        saved, peak = measured(which, x, train, used)
        equal = "equal" if predicted.saved_bytes == saved else "NOT EQUAL"
        off = f"{100 * (predicted.peak_bytes / peak - 1):+.2f} %"
        rows.append(
            [title, f"{predicted.saved_bytes:,}", f"{saved:,}", equal, f"{predicted.peak_bytes:,}", f"{peak:,}", off]
        )
        agrees &= predicted.saved_bytes == saved and abs(predicted.peak_bytes / peak - 1) <= 0.03
    reduced = "" if tuple(shape) == small else f", reduced from {'x'.join(map(str, shape))}"
    print(f"\nthe real thing at {'x'.join(map(str, small))}{reduced}: bytes that backward holds, and peak of the step")
    headers = ["method", "saved, planned", "measured", "", "peak, planned", "measured", ""]
    align = ("left", "right", "right", "left", "right", "right", "right")
    print(tabulate(rows, headers, disable_numparse=True, colalign=align))
    return 0 if agrees else 1


def measured(model: nn.Module, x: Tensor, train: str, ratios: Any) -> tuple[int, int]:
    """Saved bytes and peak of a real step."""
    chosen, before = trains(model, train), {p: p.requires_grad for p in model.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name, parameter))
    if ratios is not None:
        table = surgeon_fx.ratios(model)
        table.update(ratios if isinstance(ratios, Mapping) else dict.fromkeys(table, ratios))
    try:
        return retained_bytes(model(x), model), measured_peak(model, x)[0]
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)


def run(arguments: argparse.Namespace) -> int:
    """1 where a check fails."""
    if arguments.all_paper:
        return all_paper()
    study, outcomes = methods.compare(arguments, PUBLISHED.get(arguments.model))
    if not arguments.verify:
        return 0
    full = next((one.plan for one in outcomes if one.method == "full"), None) or plan(study.model, study.x, train="all")
    return verify(arguments.model, study.x.shape, study.x.dtype, full.saved_bytes, arguments.ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 2 where the arguments make no sense."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods.add_arguments(parser)
    parser.add_argument("--verify", action="store_true", help="run the real thing, at a size that fits, and compare")
    parser.add_argument("--all-paper", action="store_true", help="every static figure of the paper against ours")
    return answer(run, parser.parse_args(arguments))


if __name__ == "__main__":
    leave(main())
