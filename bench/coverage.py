"""Transforms many models and says what came of it: exact at ratio 0? rewritten in graphs? how much is held?

    python bench/coverage.py --suite timm --quick
    python bench/coverage.py --suite all --json bench/results/coverage.jsonl --resume
    python bench/coverage.py --suite all --resume --against earlier.jsonl

One smallest model of each timm family; torchvision's models for classification, segmentation, detection, video and
optical flow; small Hugging Face models with random weights. Inputs are small, models in training mode. Models run in a
process beside this one, which is replaced when a model takes longer than --limit or ends it.

- in graphs: of the calls of convolutions, linears and norms, the share that ran as rewritten nodes of a graph. The rest
  was rewritten call by call outside of graphs, or ran natively
- graphs, breaks: as `explain` counts them
- eager, 0, 0.9: bytes the autograd graph keeps alive after forward, parameters and buffers apart
- handled: of those, the share that operations rewritten at 0.9 answer for, by `explain`
- first call: seconds of the first transformed forward beyond an eager one
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from common import MIB, RESULTS, ChildProcess, Environment, Row, environment, progress
from coverage_models import SUITES, quick_models
from tabulate import tabulate

from surgeon_fx import commands

RATIO = 0.9
EXACT_LIMIT = 1.03  # of the exact tier's bytes over eager's
MODELS_PER_PROCESS = 12
CHECK = Path(__file__).with_name("coverage_check.py")
UNITS = {
    **dict.fromkeys(("transforms", "deterministic", "forward_equal", "gradients_equal"), "bool"),
    **dict.fromkeys(("pruned_forward_equal", "pruned_finite"), "bool"),
    **dict.fromkeys(("graphs", "breaks", "layer_calls"), "count"),
    **dict.fromkeys(("eager", "exact", "pruned"), "bytes"),
    **dict.fromkeys(("share", "handled"), "share"),
    **dict.fromkeys(("first_call", "seconds"), "s"),
}
LAST = "seconds"  # with it, a model is done


@dataclass
class Result:
    """What came of one model: a number for each metric that was reached, and what there is to say about it."""

    suite: str
    model: str
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.suite}:{self.model}"

    def is_true(self, metric: str) -> bool:
        return self.values.get(metric) == 1

    def over_eager(self, metric: str) -> float:
        return self.values.get(metric, 0) / max(self.values.get("eager", 0), 1)

    def note(self) -> str:
        return "; ".join(note for metric, note in self.notes.items() if note and metric not in ("handled", "breaks"))

    def rows(self, where: Environment) -> list[Row]:
        """One row of bench/common.py's schema for each metric."""
        case = {"suite": self.suite, "model": self.model, "ratio": RATIO}
        rows = []
        for metric, x in self.values.items():
            tier = "eager" if metric in ("eager", "deterministic") else "surgeon_fx"
            rows.append(Row("coverage", case, tier, metric, UNITS[metric], x, x, x, 1, "", self.notes[metric], where))
        return rows


def results_of(rows: Iterable[Row]) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}
    for row in rows:
        key = row.case["suite"], row.case["model"]
        result = results.setdefault(key, Result(*key))
        result.values[row.metric], result.notes[row.metric] = row.p50 or 0.0, row.note
    return list(results.values())


def finished_rows(path: Path) -> list[Row]:
    """The rows of the models that a file holds completely; a line cut off by a crash ends it."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(Row.from_json(line))
        except (KeyError, TypeError, json.JSONDecodeError):
            break
    done = {(r.suite, r.model) for r in results_of(rows) if LAST in r.values}
    return [row for row in rows if (row.case["suite"], row.case["model"]) in done]


class Checks:
    """Has models checked in another process, a new one after every few models and whenever one is lost."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.process: ChildProcess | None = None
        self.asked = 0

    def __call__(self, suite: str, model: str) -> Result:
        if self.asked % MODELS_PER_PROCESS == 0:
            self.close()
        self.asked += 1
        if self.process is None:
            self.process = ChildProcess(model, [sys.executable, str(CHECK)])
        try:
            return Result(suite, model, **self.process.ask(f"{suite} {model}", self.limit))
        except ValueError as error:
            self.close()
            return Result(suite, model, {"transforms": 0, LAST: 0}, {"transforms": str(error), LAST: ""})

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def report(results: list[Result]) -> str:
    def line(r: Result) -> dict[str, str]:
        def shown(text: str, metric: str, by: float = 1) -> str:
            return text.format(r.values[metric] / by) if metric in r.values else "-"

        def word(metric: str) -> str:
            return "-" if metric not in r.values else "yes" if r.is_true(metric) else "NO"

        eager = max(r.values.get("eager", 0), 1)
        return {
            "model": r.name,
            "forward": word("forward_equal"),
            "gradients": word("gradients_equal"),
            f"forward {RATIO}": word("pruned_forward_equal"),
            "finite": word("pruned_finite"),
            "graphs": shown("{:.0f}", "graphs"),
            "breaks": shown("{:.0f}", "breaks"),
            "in graphs": shown("{:.3f}", "share"),
            "eager MiB": shown("{:.1f}", "eager", MIB),
            "0/eager": shown("{:.3f}", "exact", eager),
            f"{RATIO}/eager": shown("{:.3f}", "pruned", eager),
            "handled": shown("{:.3f}", "handled"),
            "first call s": shown("{:.1f}", "first_call"),
            "note": r.note()[:100],
        }

    table = tabulate([line(r) for r in results], headers="keys", disable_numparse=True)
    return "\n".join([table, "", *exceptions(results), summary(results)])


def exceptions(results: list[Result]) -> list[str]:
    """How many of how many, and every exception by name."""
    done = [r for r in results if r.is_true("transforms")]
    lines = [f"{len(done)} of {len(results)} models transform and run"]
    lines += [f"  {r.name}: {r.notes['transforms']}" for r in results if r not in done]

    def count(what: str, holds: Callable[[Result], bool], why: Callable[[Result], str]) -> None:
        failed = [r for r in done if not holds(r)]
        lines.append(f"{len(done) - len(failed)} of {len(done)}: {what}")
        lines.extend(f"  {r.name}: {why(r)}".rstrip(": ") for r in failed)

    count("forward equal to the bit at ratio 0", lambda r: r.is_true("forward_equal"), Result.note)
    count("loss and every gradient equal to the bit at ratio 0", lambda r: r.is_true("gradients_equal"), Result.note)
    count(f"forward equal at {RATIO}", lambda r: r.is_true("pruned_forward_equal"), Result.note)
    count(f"backward finite at {RATIO}", lambda r: r.is_true("pruned_finite"), Result.note)
    count(
        "all convolutions, linears and norms ran as rewritten nodes",
        lambda r: r.is_true("share"),
        lambda r: f"{r.values.get('share', 0):.3f}: {r.notes.get('share', '')}; {r.notes.get('breaks', '')}",
    )
    count(
        f"held at 0 within {EXACT_LIMIT} of eager's bytes",
        lambda r: r.over_eager("exact") <= EXACT_LIMIT,
        lambda r: f"{r.over_eager('exact'):.3f}",
    )
    return lines


def summary(results: list[Result]) -> str:
    done = [r for r in results if r.is_true("transforms")]
    if not done:
        return f"0 of {len(results)} transform"

    def is_equal(r: Result) -> bool:
        steady = r.is_true("deterministic")  # if eager is not, nothing can be compared
        return not steady or all(map(r.is_true, ("forward_equal", "gradients_equal", "pruned_forward_equal")))

    shares, held = ([r.values["share"] for r in done], [r.over_eager("pruned") for r in done])
    return (
        f"{len(done)} of {len(results)} transform, {sum(map(is_equal, done))} equal eager where eager equals itself; "
        f"in graphs: median {median(shares):.2f}, {sum(share == 1 for share in shares)} at 1.00; "
        f"held at {RATIO}: median {median(held):.3f}, largest {max(held):.3f}"
    )


def comparison(results: list[Result], earlier: list[Result]) -> list[str]:
    """The models that hold more at 0.9 than they did, the largest growth first."""
    before = {r.name: r for r in earlier if "pruned" in r.values}
    both = [(r, before[r.name]) for r in results if r.name in before and "pruned" in r.values]
    more = [(r, old) for r, old in both if r.values["pruned"] > old.values["pruned"]]
    more.sort(key=lambda pair: pair[0].over_eager("pruned") - pair[1].over_eager("pruned"), reverse=True)
    lines = [
        f"  {r.name}: {old.over_eager('pruned'):.4f} -> {r.over_eager('pruned'):.4f} of eager's bytes, "
        f"{r.values['pruned'] - old.values['pruned']:+.0f} bytes"
        for r, old in more
    ]
    return [f"{len(more)} of {len(both)} models in both hold more at {RATIO} than earlier", *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a fast subset of each suite")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS / "coverage.jsonl")
    commands.add_quiet(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the models that --json does not hold yet")
    parser.add_argument("--against", type=Path, help="an earlier --json: which models hold more than they did?")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one model may take")
    arguments = parser.parse_args()
    if arguments.against is not None and not arguments.against.exists():
        parser.error(f"--against {arguments.against}: no such file")
    suites = list(SUITES) if arguments.suite == "all" else [arguments.suite]
    cases = quick_models(*suites) if arguments.quick else [case for suite in suites for case in SUITES[suite]()]
    cases = [case for case in cases if not arguments.only or arguments.only in case.name]
    rows = finished_rows(arguments.json) if arguments.resume else []
    done = {(row.case["suite"], row.case["model"]) for row in rows}
    left = [case for case in cases if (case.suite, case.name) not in done]
    where = environment(torch.device("cpu"))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    checks = Checks(arguments.limit)
    with arguments.json.open("w") as file, contextlib.suppress(KeyboardInterrupt):  # what is done is reported
        file.writelines(row.to_json() + "\n" for row in rows)
        for case in (bar := progress(arguments.quiet, left, unit="model")):
            bar.set_description(f"{case.suite}:{case.name}")
            found = checks(case.suite, case.name).rows(where)
            file.writelines(row.to_json() + "\n" for row in found)
            file.flush()
            rows += found
    checks.close()
    results = results_of(rows)
    print(report(results))
    if arguments.against is not None:
        print("\n".join(comparison(results, results_of(finished_rows(arguments.against)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
