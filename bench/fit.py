"""Budgets against what a real step takes: `surgeon_fx.fit` at budgets between the least and the dense bytes.

    python bench/fit.py --model tv:resnet50 --batch 4 --budgets 20

For each budget the ratios are found from shapes, then a real step runs: bytes held (read off the autograd graph) must
be within the budget and within 2 % of it, and both they and the measured peak (torch's CPU allocator, between
operations) must not fall as budgets rise.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from common import MIB, RESULTS, Row, RowWriter, environment, progress
from tabulate import tabulate

import surgeon_fx
from surgeon_fx import commands
from surgeon_fx.planner.measure import measured_peak
from surgeon_fx.retained import retained_bytes


def main() -> int:
    parser = commands.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tv:resnet50", help="a name of surgeon_fx.zoo")
    parser.add_argument("--batch", type=commands.count, default=4)
    parser.add_argument("--budgets", type=commands.count, default=20)
    commands.add_quiet(parser)
    parser.add_argument("--json", type=Path, default=RESULTS / "fit.jsonl")
    return commands.answer(measure, parser.parse_args())


def measure(arguments: argparse.Namespace) -> int:
    shape = (arguments.batch, *surgeon_fx.zoo.input_shape(arguments.model)[1:])
    torch.manual_seed(0)
    model, x = surgeon_fx.transform(surgeon_fx.zoo.create(arguments.model)), torch.randn(shape)
    least, most = (surgeon_fx.plan(model, shape, ratios=ratio).saved_bytes for ratio in (1.0, 0.0))
    table, here = [], environment(torch.device("cpu"))
    with RowWriter(arguments.json) as writer:
        for step in progress(arguments.quiet, range(1, arguments.budgets + 1), unit="budget"):
            budget = least + (most - least) * step // (arguments.budgets + 1)
            found = surgeon_fx.fit(model, shape, budget=budget)
            surgeon_fx.ratios(model).update(found.ratios)
            held, peak = retained_bytes(model(x), model), measured_peak(model, x)[0]
            table.append((budget, held, peak))
            case = {"model": arguments.model, "shape": shape, "budget": budget}
            for metric, value in (("held", held), ("peak", peak)):
                writer.write(Row("fit", case, "fit", metric, "bytes", value, value, value, 1, "", "", here))
    rows = [(f"{b / MIB:.1f}", f"{h / MIB:.1f}", f"{h / b:.5f}", f"{p / MIB:.1f}") for b, h, p in table]
    print(f"{arguments.model} at {'x'.join(map(str, shape))}, between {least / MIB:.1f} and {most / MIB:.1f} MiB")
    print(tabulate(rows, ["budget MiB", "held MiB", "of budget", "peak MiB"], disable_numparse=True))
    within = all(0.98 * budget <= held <= budget for budget, held, _ in table)
    rising = all(a[1] <= b[1] and a[2] <= b[2] for a, b in pairwise(table))
    print(f"all within the budget and 2 % of it: {within}; held bytes and peak never fall: {rising}")
    return 0 if within and rising else 1


if __name__ == "__main__":
    raise SystemExit(main())
