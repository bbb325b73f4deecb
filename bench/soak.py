"""Thousands of training steps of changing batch and image sizes, with failures on the way: does memory stay flat?

    python bench/soak.py --steps 2000 --plot docs/images/soak.svg

The same steps run eager and rewritten, each in a process of its own, one thread each. Every hundred steps the resident
set is taken, a quarter of a second after the last step. In between, by turns: a batch that does not fit a limit of
memory, an input full of NaN, an exception in the middle of forward, a fork whose child trains. After each of them a
step must work, and torch must have as many bytes in use as before. There are 18 shapes: with 192 of
them, on ResNet-20, eager and rewritten both still grew after 400 steps (by 14 % and 7 %).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import MIB, RESULTS, ChildProcess, Row, RowWriter, environment, status_bytes
from tabulate import tabulate
from tqdm import tqdm

import surgeon_fx
from surgeon_fx import allocator, commands

EVERY, FAIL_EVERY = 100, 50
BATCHES, SIZES = (1, 8, 13, 16, 25, 32), (16, 24, 32)
TIERS = ("eager", "pruned")


def small_network() -> torch.nn.Module:
    """Quick to step through, with activations of up to 4 MiB."""
    layers: list[torch.nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 32)):
        convolution = torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers += [convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10))


class Interrupted(RuntimeError):
    """Raised on purpose."""


class Worker:
    """One tier, in this process."""

    def __init__(self, tier: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model: torch.nn.Module = small_network()
        if tier == "pruned":
            self.model = surgeon_fx.transform(self.model)
            surgeon_fx.ratios(self.model).fill(0.9)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.draw, self.number = random.Random(0), 0
        self.failures: list[Callable[[], None]] = [self.meet_limit, self.see_nan, self.interrupt, self.fork]
        for _ in range(3):
            self.step()

    def step(self, batch: int | None = None) -> None:
        batch, size = batch or self.draw.choice(BATCHES), self.draw.choice(SIZES)
        self.optimizer.zero_grad()
        surgeon_fx.entropy(self.model(torch.randn(batch, 3, size, size))).backward()
        self.optimizer.step()

    def meet_limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + 32 * MIB, resource.RLIM_INFINITY))
        try:
            self.step(batch=1024)
        except RuntimeError:
            return
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        raise AssertionError("the limit was not met")

    def see_nan(self) -> None:
        self.optimizer.zero_grad()
        loss = surgeon_fx.entropy(self.model(torch.full((8, 3, 24, 24), torch.nan)))
        loss.backward()
        assert loss.isnan()
        self.optimizer.zero_grad()
        for buffer in self.model.buffers():  # running statistics
            if buffer.is_floating_point():
                buffer.nan_to_num_(1.0)

    def interrupt(self) -> None:
        def fail(*_: object) -> None:
            raise Interrupted

        last_norm = [m for m in self.model.modules() if isinstance(m, torch.nn.BatchNorm2d)][-1]
        hook = last_norm.register_forward_pre_hook(fail)
        try:
            self.step(batch=16)
        except Interrupted:
            return
        finally:
            hook.remove()
        raise AssertionError("forward was not interrupted")

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            self.step(batch=8)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    def run(self) -> dict[str, float]:
        """Steps to the next measurement."""
        lost = 0
        for _ in range(EVERY):
            self.number += 1
            self.step()
            if self.number % FAIL_EVERY == 0:
                before = self.bytes_in_use()
                self.failures[self.number // FAIL_EVERY % len(self.failures)]()
                self.step()
                lost += self.bytes_in_use() - before
        time.sleep(0.25)
        return {"rss": status_bytes("VmRSS"), "lost": lost, "step": self.number}

    def bytes_in_use(self) -> int:
        """Of tensors that Python can see: activations that a failure left behind would be among them."""
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]  # graphs keep fakes
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values()) + allocator.block_bytes()[0]

    def serve(self) -> None:
        """One line in, a hundred steps, one line out."""
        for _ in sys.stdin:
            print(json.dumps(self.run()), flush=True)


def run(arguments: argparse.Namespace) -> list[Row]:
    workers = {tier: ChildProcess(tier, [sys.executable, __file__, "--serve", tier]) for tier in TIERS}
    here = environment(torch.device("cpu"))
    with RowWriter(arguments.json) as writer, tqdm(total=arguments.steps, unit="step", file=sys.stderr) as bar:
        for _ in range(arguments.steps // EVERY):
            for tier, worker in workers.items():
                found = worker.ask("run")
                for metric in ("rss", "lost"):
                    value = found[metric]
                    case = {"step": found["step"]}
                    writer.write(Row("soak", case, tier, metric, "bytes", value, value, value, 1, "", "", here))
            bar.update(EVERY)
    for worker in workers.values():
        worker.close()
    return writer.rows


def curve(rows: list[Row], tier: str, metric: str) -> list[float]:
    return [(row.p50 or 0.0) / MIB for row in rows if row.provider == tier and row.metric == metric]


def report(rows: list[Row]) -> tuple[str, bool]:
    """A table, and whether memory was flat over the second half and nothing was lost."""
    table, flat = [], True
    for tier in TIERS:
        rss, lost = curve(rows, tier, "rss"), curve(rows, tier, "lost")
        quarters = [max(rss[len(rss) * i // 4 : len(rss) * (i + 1) // 4]) for i in range(4)]
        table.append([tier, *(f"{most:.0f}" for most in quarters), f"{sum(lost):.2f}"])
        if tier != "eager":
            flat = quarters[3] <= 1.02 * quarters[2] and sum(lost) == 0
    headers = ["tier", *(f"most MiB, quarter {i}" for i in range(1, 5)), "MiB lost to failures"]
    return tabulate(table, headers, disable_numparse=True), flat


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for tier, colour in zip(TIERS, ("#888888", "#3b6ea5"), strict=True):
        rss = curve(rows, tier, "rss")
        axis.plot([EVERY * (i + 1) for i in range(len(rss))], rss, color=colour, marker=".", label=tier)
    axis.set(xlabel="step", ylabel="resident MiB", ylim=(0, None))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> int:
    parser = commands.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=commands.count, default=2000)
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.jsonl")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--serve", metavar="TIER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        Worker(arguments.serve).serve()
        return 0
    if arguments.steps < 4 * EVERY:
        parser.error(f"--steps must be at least {4 * EVERY}: memory is taken every {EVERY}, and compared by quarters")
    rows = run(arguments)
    text, flat = report(rows)
    print(text)
    print("flat over the second half, nothing lost" if flat else "NOT flat, or something was lost")
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
