"""What becomes of freed activations, strategy by strategy: memory and time of a step, and what it costs everybody else.

    python bench/allocator.py --model wrn28_10 --batch 32
    python bench/allocator.py --loop --also 0.1=/path/to/python

Each strategy is a process of its own, and the processes take turns, one step at a time. Columns:

- held, peak: resident memory after forward and at most during the step, net of the level before; in brackets over eager
- step: seconds over eager's
- numpy: CPU seconds of `a * 2 + 1` after the transform, over those of a process whose malloc nobody touched
- batch: with --loop, the first batch from 8,192 down by tenths that a step of ResNet-20 survives with 1.2 GiB of
  address space above what the process has after a small step

"own mappings" is what `surgeon_fx.transform` does. The others are made here, by the environment or by `mallopt`: malloc
untouched (the saving is an opt-in that nobody took), thresholds in the environment, thresholds for the time of a step.
--also measures the package that another Python has installed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy
import torch
from common import MIB, RESULTS, ChildProcess, Meter, Row, RowWriter, environment, spread, status_bytes
from tabulate import tabulate
from tqdm import tqdm

import surgeon_fx

KEEP = {"SURGEON_FX_KEEP_MALLOC": "1"}
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}
STRATEGIES = {  # what is set in the environment of the process
    "eager": {},
    "own mappings": {},
    "malloc untouched": KEEP,
    "thresholds": THRESHOLDS,
    "scoped thresholds": KEEP,
}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_THRESHOLD = 32 * MIB  # where glibc's own adjustment ends
NUMPY_MIB = (1.5, 3, 8, 24)
LOOP_FROM, LOOP_BYTES = 8192, int(1.2 * 1024) * MIB


class Worker:
    """One strategy, in this process."""

    def __init__(self, strategy: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(arguments.threads)
        self.strategy, self.ratio, self.meter = strategy, arguments.ratio, Meter(torch.device("cpu"))
        self.model = surgeon_fx.zoo.create(arguments.model)
        self.x = torch.randn(arguments.batch, *surgeon_fx.zoo.entry(arguments.model).input_shape[1:])
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def transform(self) -> dict[str, float]:
        if self.strategy != "eager":
            self.model = surgeon_fx.transform(self.model)
            surgeon_fx.ratios(self.model).fill(self.ratio)
        return {}

    def set_thresholds(self, size: int) -> None:
        if self.strategy == "scoped thresholds":
            for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(option, size)

    def step(self) -> dict[str, float]:
        """The second of two steps: after a pause what waits for reuse has gone back."""
        self.timed_step()
        return self.timed_step()

    def timed_step(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.set_thresholds(MIB)
        surgeon_fx.entropy(self.model(self.x)).backward()
        self.set_thresholds(LARGEST_THRESHOLD)
        return {"step": time.perf_counter() - begin}

    def measure(self) -> dict[str, float]:
        self.meter.forget()
        base = self.meter.now()
        self.set_thresholds(MIB)
        out = self.model(self.x)
        held = self.meter.now() - base
        loss = surgeon_fx.entropy(out)
        del out
        loss.backward()
        self.set_thresholds(LARGEST_THRESHOLD)
        return {"held": held, "peak": self.meter.peaks(base)["peak"]}

    def numpy(self) -> dict[str, float]:
        found = {}
        for mib in NUMPY_MIB:
            a, samples = numpy.ones(int(mib * MIB) // 8), []
            for _ in range(40):
                begin = time.process_time()
                a * 2 + 1
                samples.append(time.process_time() - begin)
            found[f"numpy {mib} MiB"] = median(samples[10:])
        return found

    def serve(self) -> None:
        """One line in, one line out."""
        for line in sys.stdin:
            print(json.dumps(getattr(self, line.strip())()), flush=True)


def find_batch(strategy: str) -> int:
    """The first batch that fits, in this process."""
    model = surgeon_fx.zoo.create("resnet20_cifar")
    if strategy != "eager":
        model = surgeon_fx.transform(model)
        surgeon_fx.ratios(model).fill(0.9)

    def step(batch: int) -> None:
        surgeon_fx.entropy(model(torch.randn(batch, 3, 32, 32))).backward()

    step(2)
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + LOOP_BYTES, -1))
    batch = LOOP_FROM
    while batch >= 8:
        try:
            step(batch)
            return batch
        except (RuntimeError, MemoryError):
            batch = int(batch * 0.9)
    return 0


def run(arguments: argparse.Namespace) -> list[Row]:
    others = dict(other.split("=", 1) for other in arguments.also)
    pythons = dict.fromkeys(STRATEGIES, sys.executable) | others
    clean = {k: v for k, v in os.environ.items() if k not in KEEP | THRESHOLDS}
    served = [__file__, *sys.argv[1:]]
    workers = {
        name: ChildProcess(
            name,
            ["env", *(f"{k}={v}" for k, v in STRATEGIES.get(name, {}).items()), python, *served, "--serve", name],
        )
        for name, python in pythons.items()
    }
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    turns = [*["numpy"] * 2, "transform", "step", "measure", *["step"] * arguments.repeats, *["numpy"] * 3]
    transformed = False
    with tqdm(total=len(turns) * len(workers), unit="turn", file=sys.stderr) as bar:
        for number, turn in enumerate(turns):
            transformed |= turn == "transform"
            for name, worker in workers.items():
                for metric, value in worker.ask(turn).items():
                    warm = turn == "step" and turns[number - 1] == "transform"
                    key = metric if transformed else f"{metric} before"
                    if not warm:
                        samples[name].setdefault(key, []).append(value)
                bar.update()
    for worker in workers.values():
        worker.close()
    if arguments.loop:
        for name, python in pythons.items():
            command = [python, *served, "--find-batch", name]
            found = subprocess.run(
                command, env=clean | STRATEGIES.get(name, {}), capture_output=True, text=True, check=False
            )
            samples[name]["batch"] = [float(found.stdout or 0)]  # 0: it did not survive
    case = {"model": arguments.model, "batch": arguments.batch, "ratio": arguments.ratio}
    here = environment(torch.device("cpu"))
    units = {"held": "bytes", "peak": "bytes", "batch": "samples"}
    with RowWriter(arguments.json) as writer:
        for name, metrics in samples.items():
            for metric, values in metrics.items():
                p20, p50, p80 = spread(values)
                unit = units.get(metric, "s")
                writer.write(Row("allocator", case, name, metric, unit, p50, p20, p80, len(values), "", "", here))
    return writer.rows


def report(rows: list[Row]) -> str:
    value = {(row.provider, row.metric): row.p50 or 0.0 for row in rows}
    names = list(dict.fromkeys(row.provider for row in rows))

    def cells(name: str) -> dict[str, str]:
        found = {"strategy": name}
        for metric in ("held", "peak"):
            bytes_, eager = value[name, metric], value["eager", metric]
            found[f"{metric} MiB"] = f"{bytes_ / MIB:.0f} ({bytes_ / eager:.2f})"
        found["step"] = f"{value[name, 'step'] / value['eager', 'step']:.2f}"
        for mib in NUMPY_MIB:
            metric = f"numpy {mib} MiB"
            found[metric] = f"{value[name, metric] / value['eager', metric + ' before']:.2f}"
        if (name, "batch") in value:
            found["batch"] = f"{value[name, 'batch']:.0f}"
        return found

    case, here = rows[0].case, rows[0].environment
    title = f"{case['model']}, batch {case['batch']}, ratio {case['ratio']}; {here.device}, {here.threads} threads"
    return "\n".join([title, tabulate([cells(name) for name in names], headers="keys", disable_numparse=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn28_10", help="a name of surgeon_fx.zoo's own")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--loop", action="store_true", help="also look for the largest batch under a memory limit")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON", help="another installation")
    parser.add_argument("--json", type=Path, default=RESULTS / "allocator.jsonl")
    parser.add_argument("--serve", metavar="STRATEGY", help=argparse.SUPPRESS)
    parser.add_argument("--find-batch", metavar="STRATEGY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        Worker(arguments.serve, arguments).serve()
    elif arguments.find_batch:
        print(find_batch(arguments.find_batch))
    else:
        print(report(run(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
