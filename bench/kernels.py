"""Times prune + pack + restore against what it costs to copy the tensor, and against other ways to do it.

    python bench/kernels.py                                   # everything; --quick for under a minute
    python bench/kernels.py --sizes 20,22,25 --ratios 0.9 --plot bench/results/kernels.png
    python bench/kernels.py --from-json bench/results/kernels.jsonl --dtypes fp32 --plot fp32.png

Providers are described in kernel_providers.py. At each case they take turns, one repetition a round, so that a noisy
machine is unfair to all alike. A repetition is compress and then decompress, timed apart and together; what they
return is freed after the clock has stopped. Before a short repetition come a few untimed ones, so that each provider
finds the caches as it leaves them itself: after one alone, a copy still pays for what a slow provider swept away.
Ratios are ratios of medians.

"fresh" memory comes from the allocator, as a user's would: page faults are in the time where the allocator maps memory
anew, which glibc does above 32 MiB and mostly avoids below. "touched" memory was written to before.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Environment,
    Row,
    RowWriter,
    Spread,
    Stopwatch,
    environment,
    others_core_seconds,
    peak_growth,
    peak_unavailable_reason,
    pick_device,
    read_rows,
    spread,
)
from kernel_providers import DTYPES, VALUES, Provider, Steps, providers, saved_bytes
from kernel_report import plot, tables
from tqdm import tqdm

from surgeon_fx import kernels

BENCHMARK = "kernels"
YARDSTICKS = ("copy", "clone")
SIZES = (12, 14, 16, 18, 20, 22, 24, 25, 26)
QUICK_SIZES = (12, 16, 20, 22)
LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100
WARM_UPS, WARM_BELOW_SECONDS = 2, 0.03  # a longer repetition sweeps the caches itself
CHECK_SIZES = (33, 70_001, (1 << 22) + 1)  # too small to sample, sampled and threaded, restored past the cache


@dataclass(frozen=True)
class Case:
    elements: int
    dtype: str
    ratio: float
    values: str

    def tensor(self, device: torch.device) -> torch.Tensor:
        return VALUES[self.values](self.elements, DTYPES[self.dtype], device)


@dataclass
class Timed:
    """A provider prepared for a case, and its repetitions so far, in seconds."""

    provider: Provider
    steps: Steps
    compress: list[float] = field(default_factory=list)
    decompress: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    spent: float = 0.0  # warm-ups included

    def turn(self, watch: Stopwatch) -> None:
        """One repetition that counts, and before it those that do not."""
        begin = time.perf_counter()
        took = self.together[-1] if self.together else self.repeat(watch)[2]
        if took < WARM_BELOW_SECONDS:
            for _ in range(WARM_UPS):
                self.repeat(watch)
        compress, decompress, together = self.repeat(watch)
        self.compress.append(compress)
        self.decompress.append(decompress)
        self.together.append(together)
        self.spent += time.perf_counter() - begin

    def repeat(self, watch: Stopwatch) -> tuple[float, float, float]:
        start = watch.mark()
        saved = self.steps.compress()
        middle = watch.mark()
        restored = self.steps.decompress(saved) if self.steps.decompress else saved
        end = watch.mark()
        del saved, restored  # not before the clock has stopped
        return watch.seconds(start, middle), watch.seconds(middle, end), watch.seconds(start, end)

    def wants_more(self, budget: float) -> bool:
        done = len(self.together)
        return done < LEAST_REPETITIONS or (done < MOST_REPETITIONS and self.spent < budget)


def time_case(
    case: Case, chosen: Iterable[Provider], device: torch.device, budget: float, where: Environment
) -> list[Row]:
    x = case.tensor(device)
    watch = Stopwatch(device)
    timed = [Timed(provider, provider.prepare(x, case.ratio)) for provider in chosen]
    begin, others = time.perf_counter(), others_core_seconds()
    while turn := [one for one in timed if one.wants_more(budget)]:
        for one in turn:
            one.turn(watch)
    busy_cores = max(0.0, others_core_seconds() - others) / (time.perf_counter() - begin)
    where = replace(where, busy_cores=round(busy_cores, 2))
    return [row for one in timed for row in timing_rows(case, one, x.nbytes, where)]


def timing_rows(case: Case, timed: Timed, dense_bytes: int, where: Environment) -> list[Row]:
    provider, together = timed.provider, spread(timed.together)
    measured = {"together": ("s", together)}  # metric: unit, value
    if timed.steps.decompress:
        measured |= {"compress": ("s", spread(timed.compress)), "decompress": ("s", spread(timed.decompress))}
    if provider.moved_bytes:
        saved = saved_bytes(timed.steps.compress()) if timed.steps.decompress else 0
        moved = provider.moved_bytes(dense_bytes, saved) / 1e9
        measured["bandwidth"] = ("GB/s", Spread(moved / together.p80, moved / together.p50, moved / together.p20))
    return [
        row(case, provider, metric, where, unit, value, len(timed.together), timed.steps.note)
        for metric, (unit, value) in measured.items()
    ]


def row(
    case: Case,
    provider: Provider,
    metric: str,
    where: Environment,
    unit: str,
    value: Spread | None,
    repetitions: int = 0,
    note: str = "",
) -> Row:
    p20, p50, p80 = value or (None, None, None)
    return Row(
        BENCHMARK, asdict(case), provider.name, metric, unit, p50, p20, p80, repetitions, provider.memory, note, where
    )


def mismatch(provider: Provider, dtype: str, ratio: float, values: str, device: torch.device) -> str:
    """How a surgeon_fx provider differs from the reference backend; empty where no bit does."""
    bits = kernels.layout.FLOAT_BITS[DTYPES[dtype]].integer
    for elements in CHECK_SIZES:
        x = Case(elements, dtype, ratio, values).tensor(device)
        x[1:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, -torch.nan], dtype=x.dtype)
        steps = provider.prepare(x, ratio)
        assert steps.decompress is not None
        expected, got = kernels.compress(x, ratio, "reference"), steps.compress()
        restored = steps.decompress(got)
        pairs = {
            "values": (expected.values.view(bits), got.values.view(bits)),
            "bitmask": (expected.bitmask, got.bitmask),
            "restored tensor": (kernels.decompress(expected, "reference").view(bits), restored.view(bits)),
        }
        for part, (want, have) in pairs.items():
            if not torch.equal(want, have):
                return f"wrong {part} at {elements} elements, {dtype}, ratio {ratio}, {values} values: not timed"
    return ""


def memory_row(case: Case, provider: Provider, device: torch.device, isa: str | None, where: Environment) -> Row:
    """Transient memory of compress; on a CPU in a process of its own."""
    if reason := peak_unavailable_reason(device):
        return row(case, provider, "transient", where, "bytes", None, note=reason)
    if device.type != "cpu":
        extra = transient_bytes(case, provider, device)
        return row(case, provider, "transient", where, "bytes", Spread(extra, extra, extra), 1)
    request = {"case": asdict(case), "provider": provider.name, "threads": torch.get_num_threads(), "isa": isa}
    command = [sys.executable, __file__, "--memory-child", json.dumps(request)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        note = f"the measuring process failed: {child.stderr.strip().splitlines()[-1:]}"
        return row(case, provider, "transient", where, "bytes", None, note=note)
    extra = int(child.stdout)
    return row(case, provider, "transient", where, "bytes", Spread(extra, extra, extra), 1)


def transient_bytes(case: Case, provider: Provider, device: torch.device) -> int:
    """How far the peak of one compress lies above the memory before it and its own outputs."""
    small = Case(1 << 17, case.dtype, case.ratio, case.values).tensor(device)
    provider.prepare(small, case.ratio).compress()  # code pages, thread stacks
    steps = provider.prepare(case.tensor(device), case.ratio)
    saved, growth = peak_growth(steps.compress, device)
    return max(0, growth - (saved_bytes(saved) if provider.memory == "fresh" else 0))


def memory_child(request: dict[str, Any]) -> None:
    device = torch.device("cpu")
    torch.set_num_threads(request["threads"])
    with forced(request["isa"]):
        print(transient_bytes(Case(**request["case"]), providers(device)[request["provider"]], device))


def forced(isa: str | None) -> contextlib.AbstractContextManager[None]:
    return kernels.native.forced_instruction_set(isa) if isa else contextlib.nullcontext()


def run(args: argparse.Namespace, chosen: list[Provider], device: torch.device) -> tuple[list[Row], list[str]]:
    """All rows, and what was found wrong."""
    where, wrong = environment(device), []
    groups = [(v, d, r) for v in args.values for d in args.dtypes for r in args.ratios]
    progress = tqdm(total=len(groups) * len(args.sizes), unit="case", file=sys.stderr)
    with RowWriter(args.json) as out, progress:
        for values, dtype, ratio in groups:
            progress.set_description(f"check {dtype} {ratio:g} {values}")
            refused = {
                p.name: mismatch(p, dtype, ratio, values, device) for p in chosen if p.exact and not p.unavailable()
            }
            wrong += [f"{name}: {reason}" for name, reason in refused.items() if reason]
            for size in args.sizes:
                case = Case(1 << size, dtype, ratio, values)
                progress.set_description(f"2^{size} {dtype} {ratio:g} {values}")
                able = []
                for provider in chosen:
                    reason = provider.unavailable() or refused.get(provider.name, "")
                    if not reason and provider.largest and case.elements > provider.largest:
                        reason = f"not run above {provider.largest} elements"
                    if reason:
                        out.write(row(case, provider, "together", where, "s", None, note=reason))
                    else:
                        able.append(provider)
                for one in time_case(case, able, device, args.budget, where):
                    out.write(one)
                if args.memory:
                    for provider in able:
                        if provider.name not in YARDSTICKS:
                            out.write(memory_row(case, provider, device, args.isa, where))
                progress.update()
    return out.rows, wrong


def select_rows(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """The rows that the options ask for; an option not given asks for all."""
    wanted = {
        "elements": args.sizes and [1 << size for size in args.sizes],
        "dtype": args.dtypes,
        "ratio": args.ratios,
        "values": args.values,
    }
    rows = [r for r in rows if all(not want or r.case[key] in want for key, want in wanted.items())]
    names = pick_names(args.providers, sorted({r.provider for r in rows}))
    return [r for r in rows if r.provider in names]


def pick_names(patterns: list[str] | None, names: Iterable[str]) -> list[str]:
    """The names that any pattern matches, and the yardsticks. ValueError for a pattern without a match."""
    names = list(names)
    if not patterns:
        return names
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no provider matches {pattern!r}; there are {', '.join(names)}")
    return [n for n in names if n in YARDSTICKS or any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def listed(kind: str, convert: Any, accept: Any) -> Any:
    """An argparse type: a comma-separated list whose every entry converts and is accepted."""

    def parse(text: str) -> list[Any]:
        entries = []
        for part in text.split(","):
            try:
                entry = convert(part.strip())
            except ValueError:
                entry = None
            if entry is None or not accept(entry):
                raise argparse.ArgumentTypeError(f"{part.strip()!r} is not {kind}")
            entries.append(entry)
        return list(dict.fromkeys(entries))

    return parse


def parse_arguments(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = listed("a power of two between 6 and 30", int, range(6, 31).__contains__)
    ratios = listed("a share to drop of at least 0.05 and less than 1", float, lambda r: 0.05 <= r < 1)
    dtypes = listed(f"one of {', '.join(DTYPES)}", str, DTYPES.__contains__)
    add = parser.add_argument
    add("--sizes", type=sizes, help="powers of two, such as 20,22,25")
    add("--ratios", type=ratios, help="shares dropped, such as 0.5,0.9")
    add("--dtypes", type=dtypes, help=f"of {', '.join(DTYPES)}")
    add(
        "--values", choices=[*VALUES, "all"], help="what the tensor holds; the others than normal are hard to select in"
    )
    add(
        "--providers",
        type=listed("a name", str, bool),
        help="names or patterns, such as 'surgeon_fx:*'; copy and clone always run",
    )
    add("--threads", type=int, help="as torch.set_num_threads")
    add("--isa", help="force an instruction set of the C kernels")
    add("--budget", type=float, help="seconds of repetitions per provider and case, at least 3 repetitions")
    add("--quick", action="store_true", help="a small selection, in under a minute")
    add("--memory", action="store_true", help="measure the transient memory of compress too, a process per case")
    add("--json", type=Path, default=RESULTS / "kernels.jsonl", help="where the rows go")
    add("--plot", type=Path, metavar="PATH.png", help="draw the rows")
    add("--from-json", type=Path, help="measure nothing, show the rows of this file; other options select among them")
    add("--memory-child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    if args.budget is not None and args.budget <= 0:
        parser.error(f"--budget must be a positive number of seconds, got {args.budget}")
    if args.values:
        args.values = list(VALUES) if args.values == "all" else [args.values]
    if args.plot and args.plot.suffix != ".png":
        parser.error(f"--plot must name a .png file, got {args.plot}")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = parse_arguments(argv)
    if args.memory_child:
        memory_child(args.memory_child)
        return 0
    wrong: list[str] = []
    try:
        if args.from_json:
            rows = select_rows(read_rows(args.from_json, BENCHMARK), args)
        else:
            args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
            args.ratios = args.ratios or ([0.9] if args.quick else [0.5, 0.9, 0.95])
            args.dtypes = args.dtypes or ["fp32", "bf16"]
            args.values = args.values or ["normal"]
            args.budget = args.budget or (0.2 if args.quick else 1.0)
            if args.threads:
                torch.set_num_threads(args.threads)
            device = pick_device()
            known = providers(device)
            chosen = [known[name] for name in pick_names(args.providers, known)]
            with forced(args.isa):
                rows, wrong = run(args, chosen, device)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(tables(rows))
    if args.plot:
        plot(rows, args.plot)
    for line in wrong:
        print(f"WRONG RESULT: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
