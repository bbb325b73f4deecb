"""Memory and time of one adaptation step: eager, with checkpointing, and rewritten.

    python bench/step.py --model wrn28_10 --batch 64 --ratio 0.9
    python bench/step.py --model tv:resnet50 --batch 16 --tiers eager,no_grad,pruned --plot step.png

Each tier is a process of its own, and the processes take turns, so that what the machine does meanwhile falls on all of
them. A turn is two steps, of which the second is timed: in a training loop steps follow each other, and here a process
has waited for the others, and given freed memory back meanwhile. Eager, checkpointing and no_grad run with malloc's own
settings, as their users run them; the others with what `surgeon_fx.transform` sets. The first turn measures memory:

- saved: unique storages that backward keeps alive after forward, read off the autograd graph, custom contexts included
- held: resident set after forward, net of the level before the step
- peak: its high-water mark through forward and backward, net of the same. On CUDA: `max_memory_allocated`, and
  `max_memory_reserved` beside it

Weights and gradients are there before the step. Blocks that wait for reuse are given back before that level is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from common import MIB, RESULTS, ChildProcess, Meter, Row, RowWriter, environment, progress, read_rows, spread
from tabulate import tabulate

import surgeon_fx
from surgeon_fx import commands
from surgeon_fx.modules import checkpoint_blocks
from surgeon_fx.planner.methods import input_shape
from surgeon_fx.retained import retained_bytes

TIERS = ("eager", "no_grad", "checkpoint", "exact", "pruned")
SECONDS, BYTES = ("forward", "backward", "step"), ("saved", "held", "peak", "reserved")


class Worker:
    """One tier, in this process."""

    def __init__(self, tier: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(arguments.threads)
        self.tier, self.device = tier, torch.device(arguments.device)
        self.meter = Meter(self.device)
        shape = input_shape(arguments.model, arguments.batch, arguments.size)
        model = surgeon_fx.zoo.create(arguments.model).to(self.device)
        model.train(not arguments.eval)
        self.x = torch.randn(shape, device=self.device)
        if tier in ("exact", "pruned"):
            config = surgeon_fx.Config(
                fuse_attention=arguments.fuse_attention,
                share_saves=arguments.share_saves,
                exact_saves=arguments.exact_saves,
            )
            model = surgeon_fx.transform(model, config)
            surgeon_fx.ratios(model).fill(arguments.ratio if tier == "pruned" else 0.0)
        elif tier == "checkpoint":
            model = checkpoint_blocks(model)
        self.model = model
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, measure: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        if measure:
            self.meter.forget()
            base = self.meter.now()
        grad = self.tier != "no_grad"
        begin = self.meter.clock()
        with torch.set_grad_enabled(grad):
            out = self.model(self.x)
            forward = self.meter.clock()
            if measure:
                found["held"] = self.meter.now() - base
                found["saved"] = retained_bytes(out, self.model) if grad else 0
            middle = self.meter.clock()
            loss = surgeon_fx.entropy(out)
            del out
            if grad:
                loss.backward()
        end = self.meter.clock()
        if measure:
            return found | self.meter.peaks(base)
        backward = end - middle if grad else 0.0
        return {"forward": forward - begin, "backward": backward, "step": forward - begin + backward}

    def serve(self) -> None:
        """One line in, a step and one that counts, one line out."""
        for line in sys.stdin:
            self.step()
            print(json.dumps(self.step(line.strip() == "measure")), flush=True)


def run(arguments: argparse.Namespace) -> list[Row]:
    tiers = arguments.tiers.split(",")
    if unknown := [tier for tier in tiers if tier not in TIERS]:
        raise ValueError(f"no tier is called {unknown[0]!r}; there are {', '.join(TIERS)}")
    shape = input_shape(arguments.model, arguments.batch, arguments.size)
    case = {"model": arguments.model, "shape": shape, "ratio": arguments.ratio, "eval": arguments.eval}
    here = environment(torch.device(arguments.device))
    served = [sys.executable, __file__, *sys.argv[1:], "--serve"]
    processes = [ChildProcess(tier, [*served, tier]) for tier in tiers]
    samples: dict[str, list[dict[str, float]]] = {tier: [] for tier in tiers}
    with progress(arguments.quiet, total=(arguments.repeats + 1) * len(tiers), unit="step") as bar:
        for turn in range(arguments.repeats + 1):
            for process in processes:
                bar.set_description(process.name)
                found = process.ask("measure" if turn == 0 else "step")
                samples[process.name].append(found)
                bar.update()
    for process in processes:
        process.close()
    with RowWriter(arguments.json) as writer:
        for tier, found in samples.items():
            for metric in (*BYTES, *SECONDS):
                values = [one[metric] for one in found if metric in one]
                if values:
                    p20, p50, p80 = spread(values)
                    unit = "bytes" if metric in BYTES else "s"
                    row = Row("step", case, tier, metric, unit, p50, p20, p80, len(values), "", "", here)
                    writer.write(row)
    return writer.rows


def report(rows: list[Row]) -> str:
    tiers = list(dict.fromkeys(row.provider for row in rows))
    value = {(row.provider, row.metric): row for row in rows}
    first = tiers[0]

    def cell(tier: str, metric: str) -> str:
        row, base = value.get((tier, metric)), value.get((first, metric))
        if row is None or row.p50 is None:
            return ""
        times = f" ({row.p50 / base.p50:.2f})" if base and base.p50 else ""
        if row.unit == "bytes":
            return f"{row.p50 / MIB:.0f}{times}"
        return f"{row.p50:.2f} [{row.p20:.2f} {row.p80:.2f}]{times}"

    table = [
        {"tier": tier}
        | {
            f"{metric} {'MiB' if metric in BYTES else 's'}": cell(tier, metric)
            for metric in (*BYTES, *SECONDS)
            if any((one, metric) in value for one in tiers)
        }
        for tier in tiers
    ]
    case, here = rows[0].case, rows[0].environment
    shape = "x".join(map(str, case["shape"]))
    mode = "eval" if case["eval"] else "train"
    title = f"{case['model']} at {shape}, {mode} mode, ratio {case['ratio']}; {here.device}, {here.threads} threads"
    note = f"p50 [p20 p80] of {value[first, 'step'].repetitions} steps in turn; in brackets, over {first}"
    return "\n".join([title, tabulate(table, headers="keys", disable_numparse=True), note])


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tiers = list(dict.fromkeys(row.provider for row in rows))
    value = {(row.provider, row.metric): row.p50 or 0.0 for row in rows}
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    places = range(len(tiers))
    memory.barh(places, [value.get((t, "peak"), 0) / MIB for t in tiers], color="#c9d7e8", label="peak")
    memory.barh(places, [value.get((t, "held"), 0) / MIB for t in tiers], color="#3b6ea5", height=0.5, label="held")
    memory.set_xlabel("MiB, as the system counts them")
    forward = [value.get((t, "forward"), 0) for t in tiers]
    seconds.barh(places, forward, color="#3b6ea5", label="forward")
    seconds.barh(
        places, [value.get((t, "backward"), 0) for t in tiers], left=forward, color="#c9d7e8", label="backward"
    )
    seconds.set_xlabel("seconds per step")
    for axis in (memory, seconds):
        axis.set_yticks(list(places), tiers)
        axis.invert_yaxis()
        axis.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{rows[0].case['model']}, {'x'.join(map(str, rows[0].case['shape']))}", fontsize=10)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = commands.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="tv:resnet50", help="a name of surgeon_fx.zoo: its own, timm's, tv:..., hf:..."
    )
    parser.add_argument("--batch", type=commands.count, help="default: the model's")
    parser.add_argument("--size", type=commands.size, help="224 or 540x960")
    parser.add_argument("--ratio", type=commands.ratio, default=0.9)
    parser.add_argument("--tiers", default="eager,no_grad,checkpoint,exact,pruned", help=f"of {', '.join(TIERS)}")
    parser.add_argument("--eval", action="store_true", help="in evaluation mode: running statistics, no dropout")
    parser.add_argument("--fuse-attention", action="store_true")
    parser.add_argument("--share-saves", action="store_true")
    parser.add_argument("--exact-saves", choices=("int8", "bf16"))
    parser.add_argument("--threads", type=commands.count, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=commands.count, default=5)
    parser.add_argument("--device", type=commands.device, default="cpu")
    commands.add_quiet(parser)
    parser.add_argument("--json", type=Path, default=RESULTS / "step.jsonl")
    parser.add_argument("--plot", type=Path, help="draw the rows into this file")
    parser.add_argument("--from-json", action="store_true", help="report what --json holds; measure nothing")
    parser.add_argument("--serve", metavar="TIER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        Worker(arguments.serve, arguments).serve()
        return 0
    return commands.answer(measure, arguments)


def measure(arguments: argparse.Namespace) -> int:
    rows = read_rows(arguments.json, "step") if arguments.from_json else run(arguments)
    print(report(rows))
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
