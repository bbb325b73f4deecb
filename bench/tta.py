"""Test-time adaptation on corrupted images: every method over one stream, its errors, memory and time side by side.

    python bench/tta.py --data synthetic --model resnet56_cifar --limit 400
    python bench/tta.py --data CIFAR-10-C --model resnet56_cifar --weights cifar10_resnet56.safetensors
    python bench/tta.py --data CIFAR-10-C --model wrn28_10 --weights Standard.pt --method source,tent,surgeon \\
        --lr grid --seeds 0,1,2 --plot plots/
    python bench/tta.py --data ACDC --model segformer_b5 --weights segformer_b5.pth --batch 1 --lr 7.5e-6
    python bench/tta.py --data camvid --model segformer_camvid --weights bench/weights/segformer_camvid.safetensors \\
        --rounds 10 --lr grid --select 15 --method source,tent,cotta,full,surgeon,surgeon_norm
    python bench/tta.py --data imagenet/val --model tf_efficientnet_lite0 --weights lite0.safetensors --batch 50
    python bench/tta.py --from-json

The model adapts on through all corruptions and is never reset (other streams: `--stream`); what counts is the error of
the predictions it returns for a batch, before it has learnt from it. With several learning rates each method takes the
one that does best on the first corruptions (`--select`) with the first seed. Rows are written as corruptions are
finished, and `--resume` runs what is missing: a run that was interrupted goes on after its last corruption.

Streams: continual; reset, before each corruption; gradual, severities 1 to 5 and back; mixed, all corruptions shuffled
together; correlated:0.1, images sorted by class within a corruption, the more so the smaller the number. `--batch 1
--window 16` takes images one by one, each among the last sixteen, with an update every sixteen.

A row of metric "error" has a corruption's error, and in its case the errors batch by batch; "ratios" has SURGEON's
ratios per layer, pass by pass; "selection" the errors learning rates were chosen by. The rest is what a call costs
(`--no-measure` leaves that out), measured in a process per method that take turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tta_plot
import tta_report
from common import RESULTS, Row, RowWriter, environment, read_rows
from tta_domain import KINDS, parse_kind
from tta_measure import measure, rows_of
from tta_runs import BENCHMARK, FORWARD_ONLY, NORM_ONLY, Runner, Setting, Trial, identity, latest
from tta_source import FISHER_SAMPLES, WARM_UP_EPOCHS
from tta_stream import SYNTHETIC

from surgeon_fx import commands, zoo
from surgeon_fx.adapt import MECTA, METHODS, SAR, Adapter, CoTTA, EcoTTA, Tent
from surgeon_fx.importance import SAMPLES

# By what is trained, and for methods with SGD or dear steps their own.
GRIDS = {
    "all": (1e-5, 3e-5, 1e-4, 3e-4),
    "norm": (1e-4, 3e-4, 1e-3, 3e-3),
    "sar": (2.5e-4, 1e-3, 4e-3, 1.6e-2),
    "mecta": (2.5e-4, 7.5e-4, 2.5e-3, 7.5e-3),
    "cotta": (1e-4, 1e-3),
    "ecotta": (5e-4, 5e-3),
}
MAP_GRIDS = {  # in their place where classes are of pixels
    "all": (3e-7, 1e-6, 3e-6, 1e-5),
    "norm": (1e-5, 3e-5, 1e-4, 3e-4),
    "cotta": (1e-6, 1e-5),
}
USUAL = {
    "all": Adapter.lr,
    "norm": Tent.lr,
    "sar": SAR.lr,
    "mecta": MECTA.lr,
    "cotta": CoTTA.lr,
    "ecotta": EcoTTA.lr,
}
OWN_STATISTICS = ("source", "rotta", "mecta", "mecta_eata")  # and no use for a prior
SELECT = 3  # corruptions that decide on a learning rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data and model")
    known = "CIFAR-10-C, CIFAR-100-C, ImageNet-C, ACDC, CamVid, or images in a folder per class; or synthetic"
    data.add_argument("--data", type=Path, help=f"folder of {known}")
    data.add_argument("--stream", default="continual", help=f"one of {', '.join(KINDS)}:0.1 (default continual)")
    data.add_argument("--rounds", type=int, default=1, help="times the corruptions come (default 1)")
    data.add_argument("--corruptions", type=_names, help="domains in order, as fog,snow; default: the standard ones")
    data.add_argument("--severity", type=int, default=5, help="1 to 5 (default 5)")
    data.add_argument("--limit", type=int, help="images of each corruption; default: all")
    data.add_argument("--order", choices=("given", "random"), default="given", help="random: another for each seed")
    data.add_argument(
        "--size", type=commands.size, help="of the images: 224, or 540x960; default: the data's usual one"
    )
    data.add_argument("--split", help="of ACDC (default train) or CamVid (default test)")
    data.add_argument("--model", default="resnet56_cifar", help="a name of surgeon_fx.zoo (default resnet56_cifar)")
    data.add_argument("--weights", type=Path, help="checkpoint of the model; default: random weights")
    data.add_argument("--batch", type=int, help="default: the model's")
    data.add_argument("--window", type=int, help="with --batch 1: images that stand in for a batch")
    what = "clean images, for EATA's penalty and ecotta's warm-up: an .npz of JPEG bytes, or a folder"
    data.add_argument("--source", type=Path, help=what)
    data.add_argument("--device", type=commands.device, default="cpu")
    data.add_argument("--threads", type=int, help="default: torch's")
    how = parser.add_argument_group("methods")
    how.add_argument("--method", type=_methods, action="extend", nargs="+", help=f"some of {', '.join(METHODS)}")
    how.add_argument("--lr", type=_rates, help="one, several as 1e-5,1e-4, or grid; several are chosen from")
    how.add_argument("--select", type=int, default=SELECT, help="corruptions that choose among several --lr")
    how.add_argument("--seeds", type=_seeds, default=[0], help="as 0,1,2 (default 0)")
    how.add_argument("--prior", type=float, help="source samples that batch statistics are mixed with")
    how.add_argument("--ratio", type=float, default=0.9, help="of static (default 0.9)")
    how.add_argument("--samples", type=int, default=SAMPLES, help=f"of SURGEON's importance pass (default {SAMPLES})")
    how.add_argument("--static-ratio", type=float, default=0.9, help="in the importance pass (default 0.9)")
    how.add_argument("--every", type=int, default=1, help="batches between importance passes; 0: the first batch alone")
    how.add_argument("--on-shift", type=float, nargs="?", const=True, default=False, help="pass when inputs change")
    how.add_argument("--share-saves", action="store_true", help="Config(share_saves=True) for static and SURGEON")
    how.add_argument("--exact-saves", choices=("int8", "bf16"), help="Config(exact_saves=...) for static and SURGEON")
    how.add_argument("--warm-up-epochs", type=int, default=WARM_UP_EPOCHS, help="of ecotta (default 10)")
    how.add_argument("--warm-up-limit", type=int, help="images of ecotta's warm-up; default: all")
    out = parser.add_argument_group("measurements and output")
    out.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="memory and time as well")
    out.add_argument("--repeats", type=int, default=5, help="batches that are timed (default 5)")
    where = "rows go here (default bench/results/tta.jsonl)"
    out.add_argument("--json", type=Path, default=RESULTS / "tta.jsonl", help=where)
    out.add_argument("--resume", action="store_true", help="keep what --json has, and run the rest")
    out.add_argument("--from-json", action="store_true", help="report what --json holds; run nothing")
    commands.add_quiet(parser)
    out.add_argument("--plot", metavar="PATH", help="a folder, or what names of plots begin with")


def _names(text: str) -> list[str]:
    return [part for part in text.replace(",", " ").split() if part]


def _methods(text: str) -> list[str]:
    found = _names(text)
    if unknown := [one for one in found if one not in METHODS]:
        raise argparse.ArgumentTypeError(f"no method is called {unknown[0]!r}; there are {', '.join(METHODS)}")
    return found


def _rates(text: str) -> list[float] | str:
    if text == "grid":
        return text
    try:
        found = [float(part) for part in _names(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= lr < math.inf for lr in found):
        raise argparse.ArgumentTypeError(f"must be learning rates like 1e-4 or 1e-5,1e-4, or grid, got {text!r}")
    return found


def _seeds(text: str) -> list[int]:
    found = [int(part) for part in _names(text)]
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f"must be numbers like 0,1,2, got {text!r}")
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.from_json:
        if not arguments.json.exists():
            raise ValueError(f"--json must be a file that a run has written, and {arguments.json} is none")
        rows = latest(read_rows(arguments.json, BENCHMARK))
    else:
        rows = adapt(arguments)
    print(tta_report.text(rows))
    if arguments.plot:
        for path in tta_plot.draw(rows, arguments.plot):
            print(path)
    return 0


def adapt(arguments: argparse.Namespace) -> list[Row]:
    """Runs what is asked for; the rows of this setting, earlier ones included."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    setting = _setting(arguments)
    stream = setting.stream()
    methods = _fitting(setting, arguments, stream.segmentation)
    known = _known(arguments.json) if arguments.resume else []
    here = environment(torch.device(setting.device))
    with RowWriter(arguments.json, append=arguments.resume) as writer:
        states = arguments.json.with_suffix(".state.pt")
        runner = Runner(setting, stream, here, writer.write, known, states, arguments.quiet)
        chosen = []
        for method in methods:
            lr = _choose(runner, method, arguments, stream.segmentation)
            chosen.append(_trial(method, lr, arguments.seeds[0], arguments))
            for seed in arguments.seeds:
                runner.run(_trial(method, lr, seed, arguments))
        if arguments.measure and not all(_is_measured(trial, runner) for trial in chosen):
            found = measure(setting, chosen, arguments.repeats, torch.get_num_threads(), arguments.quiet)
            for row in rows_of(setting, stream, chosen, found, here):
                writer.write(row)
    return [row for row in latest([*known, *writer.rows]) if row.case["setting"] == runner.case]


def _setting(arguments: argparse.Namespace) -> Setting:
    if arguments.data is None:
        raise ValueError(
            f"--data must name a folder of images, or be {SYNTHETIC}; docs/benchmarks.md says where data is"
        )
    ones = ("batch", "repeats", "select", "threads", "rounds", "window", "warm_up_limit")
    for name, least in (*((name, 1) for name in ones), ("every", 0), ("warm_up_epochs", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    if arguments.window is not None and arguments.batch != 1:
        raise ValueError("--window is for images that come one by one: add --batch 1")
    parse_kind(arguments.stream)
    if arguments.source is not None and not arguments.source.exists():
        raise ValueError(f"--source must be a file or a folder of clean images, and {arguments.source} is none")
    if str(arguments.data) == SYNTHETIC and not arguments.quiet:
        print("synthetic images: memory and time are real, errors mean nothing", file=sys.stderr)
    elif arguments.weights is None and not arguments.quiet:
        print(f"warning: {arguments.model} gets random weights; --weights names a checkpoint", file=sys.stderr)
    return Setting(
        data=str(arguments.data),
        model=arguments.model,
        weights=None if arguments.weights is None else str(arguments.weights),
        batch=arguments.batch or zoo.input_shape(arguments.model)[0],
        corruptions=arguments.corruptions,
        severity=arguments.severity,
        limit=arguments.limit,
        size=arguments.size,
        split=arguments.split,
        order=arguments.order,
        device=arguments.device,
        kind=arguments.stream,
        rounds=arguments.rounds,
        window=arguments.window,
        source=None if arguments.source is None else str(arguments.source),
        share_saves=arguments.share_saves,
        exact_saves=arguments.exact_saves,
    )


def _fitting(setting: Setting, arguments: argparse.Namespace, segmentation: bool) -> list[str]:
    """The methods to run. One that was asked for and does not suit the model is an error, before anything runs."""
    asked = None if arguments.method is None else [name for names in arguments.method for name in names]
    methods = []
    for method in dict.fromkeys(METHODS if asked is None else asked):
        model = setting.build()
        try:
            _trial(method, _rates_of(method, arguments.lr, segmentation)[0], 0, arguments).adapter(model)
            if method == "ecotta" and setting.source is None:
                raise ValueError("ecotta needs labelled source data for its warm-up: --source names it")
            if method == "rotta" and segmentation:
                raise ValueError("rotta balances classes of images, and here are classes of pixels")
        except ValueError as error:
            if asked is not None:
                raise
            if not arguments.quiet:
                print(f"{method} is left out: {error}", file=sys.stderr)
        else:
            methods.append(method)
    return methods


def _rates_of(method: str, asked: list[float] | str | None, maps: bool) -> Sequence[float | None]:
    if method in FORWARD_ONLY:
        return [None]
    kind = "mecta" if method.startswith("mecta") else "norm" if method in NORM_ONLY and method != "sar" else method
    kind = kind if kind in GRIDS else "all"
    if asked is None:
        return [USUAL[kind]]
    grids = GRIDS | MAP_GRIDS if maps else GRIDS
    return grids[kind] if isinstance(asked, str) else asked


def _trial(method: str, lr: float | None, seed: int, arguments: argparse.Namespace) -> Trial:
    options: dict[str, Any] = {}
    if arguments.prior is not None and method not in OWN_STATISTICS:
        options["prior"] = arguments.prior
    if method.endswith("eata") and arguments.source is not None:
        options["fisher_samples"] = FISHER_SAMPLES
    if method == "ecotta":
        options |= {"warm_up_epochs": arguments.warm_up_epochs, "warm_up_limit": arguments.warm_up_limit}
    if method == "static":
        options["ratio"] = arguments.ratio
    if method.startswith("surgeon"):
        options |= {"samples": arguments.samples, "static_ratio": arguments.static_ratio}
        options |= {"every": arguments.every or None, "on_shift": arguments.on_shift}
    return Trial(method, options, lr, seed)


def _choose(runner: Runner, method: str, arguments: argparse.Namespace, maps: bool) -> float | None:
    """The learning rate with the lowest error on the first corruptions, of the smaller of two that are equal."""
    rates = _rates_of(method, arguments.lr, maps)
    if len(rates) == 1:
        return rates[0]
    errors = {
        lr: runner.run(_trial(method, lr, arguments.seeds[0], arguments), "selection", arguments.select)
        for lr in sorted(lr for lr in rates if lr is not None)
    }
    return min(errors, key=lambda lr: errors[lr])


def _known(path: Path) -> list[Row]:
    """The rows a file has, without a last line that was cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return read_rows(path, BENCHMARK) if whole.strip() else []


def _is_measured(trial: Trial, runner: Runner) -> bool:
    case = {"setting": runner.case, "options": trial.options, "lr": trial.lr}
    return identity("batch", trial.method, case) in runner.known


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 2 where the arguments make no sense."""
    parser = commands.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return commands.answer(run, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
