"""Memory, time and operations of a call of each method, in processes that take turns batch by batch.

Each method has a process of its own, so that none sees what another's allocator kept, and turns, so that what the
machine does meanwhile falls on all. A call is all that a method does with a batch, its importance pass included:

- held: unique storages that backward keeps alive after forward, read off the autograd graph; the most of any
  forward. Inputs of checkpointed blocks count as well. Teachers and source models run without a graph: they are in
  the peak alone
- paper cache: the paper's count, inputs of conv, linear and norm layers; for MECTA that of its authors
- peak: high-water mark of the resident set over the call, net of the level before it; on CUDA of the allocator
- time per call, and floating-point operations in convolutions and matrix products. A turn is two calls, of which the
  second is timed: in a stream calls follow each other, and here a process has waited for the others

RoTTA learns once in so many samples. Where that takes several calls, they count as one above, and time is their mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from common import ChildProcess, Environment, Meter, Row, peak_unavailable_reason, progress, spread
from paper_figures import checkpointing_bytes
from torch import Tensor, nn
from tta_runs import BENCHMARK, FORWARD_ONLY, NORM_ONLY, Setting, Trial
from tta_stream import Stream

import surgeon_fx
from surgeon_fx.adapt import MECTA, Checkpointed, RoTTA
from surgeon_fx.api import is_transformed
from surgeon_fx.modules import blocks
from surgeon_fx.planner import arithmetic
from surgeon_fx.retained import retained_bytes

WARM_UPS = 2
UNITS = {"paper_cache": "bytes", "held": "bytes", "peak": "bytes", "reserved": "bytes", "batch": "s", "gflops": "GFLOP"}


class Worker:
    """One method, in this process."""

    def __init__(self, setting: Setting, trial: Trial, threads: int) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(setting.device)
        self.meter = Meter(self.device)
        self.batches = full_batches(setting.stream(), setting.window or setting.batch)
        model = setting.build()
        torch.manual_seed(trial.seed)
        self.adapter = trial.adapter(model, setting)
        every = self.adapter.every if isinstance(self.adapter, RoTTA) else 1
        self.calls = -(-every // (setting.window or setting.batch))  # until it has learnt

    def turn(self, what: str) -> dict[str, Any]:
        """A few batches; `what` says how they are looked at."""
        batches = self._next()
        if what == "memory":
            return self._memory(batches)
        if what == "count":
            return self._count(batches)
        self._adapt(batches)
        if what != "time":
            return {}
        batches = self._next()
        begin = self.meter.clock()
        self._adapt(batches)
        return {"batch": (self.meter.clock() - begin) / self.calls}

    def _next(self) -> list[Tensor]:
        return [next(self.batches).to(self.device) for _ in range(self.calls)]

    def _adapt(self, batches: list[Tensor]) -> None:
        for x in batches:
            self.adapter(x)

    def _memory(self, batches: list[Tensor]) -> dict[str, Any]:
        if peak_unavailable_reason(self.device):
            return {}
        self.meter.forget()
        base = self.meter.now()
        self._adapt(batches)
        return dict(self.meter.peaks(base))

    def _count(self, batches: list[Tensor]) -> dict[str, Any]:
        from torch.utils.flop_counter import FlopCounterMode

        held = [0]
        inputs: list[Tensor] = []

        def enter(module: nn.Module, args: Any) -> None:
            inputs.extend(arg for arg in args if isinstance(arg, Tensor))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            held.append(retained_bytes(output, module, inputs))
            inputs.clear()

        handles = [self.adapter.model.register_forward_hook(leave)]
        if isinstance(self.adapter, Checkpointed):  # it keeps what goes into a block, out of the graph's sight
            handles += [block.register_forward_pre_hook(enter) for block in blocks(self.adapter.model).values()]
        try:
            with FlopCounterMode(display=False) as counter:
                self._adapt(batches)
        finally:
            for handle in handles:
                handle.remove()
        ratios = dict(surgeon_fx.ratios(self.adapter.model)) if is_transformed(self.adapter.model) else {}
        found = {"held": max(held), "gflops": counter.get_total_flops() / 1e9 / self.calls, "ratios": ratios}
        if isinstance(self.adapter, MECTA):
            found["paper_cache"] = self.adapter.cache_bytes  # as its authors count
        if isinstance(self.adapter, RoTTA):
            found["samples"] = len(self.adapter.memory.items)  # that it learns from, whatever the batch
        return found


def full_batches(stream: Stream, batch: int) -> Iterator[Tensor]:
    """Batches of the whole size, domain after domain, without end."""
    while True:
        for domain in stream.domains:
            for x, _ in domain.batches(batch):
                if len(x) == min(batch, len(domain)):
                    yield x


class Process(ChildProcess):
    """A worker in a process of its own."""

    def __init__(self, setting: Setting, trial: Trial, threads: int) -> None:
        super().__init__(trial.method, [sys.executable, __file__])
        self.send(json.dumps({"setting": asdict(setting), "trial": asdict(trial), "threads": threads}))


def measure(
    setting: Setting, trials: Sequence[Trial], repeats: int, threads: int, quiet: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """What each method's turns found, by method."""
    turns = [*["warm"] * WARM_UPS, "memory", "count", *["time"] * repeats]
    found: dict[str, list[dict[str, Any]]] = {trial.method: [] for trial in trials}
    processes: list[Process] = []
    try:
        processes += [Process(setting, trial, threads) for trial in trials]
        with progress(quiet, total=len(turns) * len(trials), desc="measuring", unit="batch", leave=False) as bar:
            for turn in turns:
                for process in processes:
                    bar.set_postfix_str(process.name, refresh=False)
                    found[process.name].append(process.ask(turn))
                    bar.update()
    finally:
        for process in processes:
            process.close()
    return found


def rows_of(
    setting: Setting,
    stream: Stream,
    trials: Sequence[Trial],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    here: Environment,
) -> list[Row]:
    """The rows of what `measure` found, with the paper's count beside it."""
    x = next(full_batches(stream, setting.window or setting.batch))
    count = cache(lambda samples: paper_count(setting.build(), (samples, *x.shape[1:])))
    rows = []
    for trial in trials:
        turns = found[trial.method]
        ratios = next(turn["ratios"] for turn in turns if "ratios" in turn)
        values = {metric: [turn[metric] for turn in turns if metric in turn] for metric in UNITS}
        if not values["paper_cache"] and trial.method != "ecotta":  # the paper has no count of its kind
            learns_from = next((turn["samples"] for turn in turns if "samples" in turn), len(x))
            values["paper_cache"] = [count(learns_from)(trial.method, ratios)]
        case = {"setting": setting.case(stream), "options": trial.options, "lr": trial.lr, "input": list(x.shape)}
        for metric, samples in values.items():
            if samples:
                p20, p50, p80 = spread(samples)
                fields = (metric, UNITS[metric], p50, p20, p80, len(samples), "", "", here)
                rows.append(Row(BENCHMARK, case, trial.method, *fields))
    return rows


def paper_count(model: nn.Module, shape: tuple[int, ...]) -> Callable[[str, Mapping[str, float]], int]:
    """The paper's accounting: inputs of conv, linear and norm layers, as a function of method and ratios."""
    layers = surgeon_fx.plan(model.eval(), shape, train=lambda name, parameter: False).layers

    def count(method: str, ratios: Mapping[str, float]) -> int:
        if method in FORWARD_ONLY:
            return arithmetic.largest_bytes(layers)
        if method == "checkpoint":
            return checkpointing_bytes(layers, blocks(model))
        return arithmetic.paper_cache_bytes(layers, ratios, kind="norm" if method in NORM_ONLY else None)

    return count


def serve() -> None:
    """A line that says what to measure, then one line in, one batch, one line out."""
    asked = json.loads(sys.stdin.readline())
    worker = Worker(Setting(**asked["setting"]), Trial(**asked["trial"]), asked["threads"])
    for line in sys.stdin:
        print(json.dumps(worker.turn(line.strip())), flush=True)


if __name__ == "__main__":
    serve()
