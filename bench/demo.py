"""A minute of surgeon_fx, with nothing to download.

Plans a large network without running it, then trains a small one on scikit-learn's digits, corrupts the digits it has
not seen, and adapts to them online. Each method is a process of its own that starts from the same weights; methods in
eager run with malloc's own settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import MIB, ChildProcess, Meter, peak_unavailable_reason
from tabulate import tabulate
from torch import Tensor, nn

import surgeon_fx
from surgeon_fx import adapt, commands

METHODS = {
    "source": "no adaptation",
    "bn_stat": "batch statistics alone",
    "full": "full tuning, eager",
    "checkpoint": "full tuning, checkpointed",
    "surgeon": "SURGEON",
}
LR, SIZE, BAR = 1e-3, 32, 50
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scale:
    planned: str
    depth: int  # of the network that is trained
    epochs: int
    batch: int
    batches: int  # a corruption
    corruptions: int
    methods: tuple[str, ...] = tuple(METHODS)


FULL = Scale("segformer_b5", 20, 3, 200, 2, 4, ("source", "bn_stat", "full", "surgeon"))
QUICK = Scale("resnet56_cifar", 8, 3, 100, 2, 2, ("source", "full", "surgeon"))


def gaussian(x: Tensor, sigma: float) -> Tensor:
    """Blurs with a Gaussian."""
    line = torch.exp(-torch.arange(-8, 9).square() / (2 * sigma**2))
    kernel = (line / line.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.conv2d(F.pad(x, (8, 8, 8, 8), mode="replicate"), kernel, groups=x.shape[1])
    return F.conv2d(x, kernel.transpose(2, 3), groups=x.shape[1])


def impulse(x: Tensor, share: float) -> Tensor:
    """Sets pixels to black or white at random."""
    drawn = torch.rand(x.shape)
    return x.masked_fill(drawn < share / 2, 0.0).masked_fill(drawn > 1 - share / 2, 1.0)


CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + 0.5 * torch.randn(x.shape),
    "contrast": lambda x: 0.5 + 0.15 * (x - 0.5),
    "blur": lambda x: gaussian(x, 4.0),
    "impulse noise": lambda x: impulse(x, 0.3),
    "brightness": lambda x: 0.6 * x + 0.6,
    "pixelate": lambda x: F.interpolate(F.interpolate(x, size=6, mode="area"), size=SIZE),
}


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits, shuffled, as images of three equal channels with pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = F.interpolate(torch.from_numpy(found.images).float()[:, None] / 16, size=SIZE, mode="bilinear")
    order = torch.randperm(len(x))
    return x[order].repeat(1, 3, 1, 1), torch.from_numpy(found.target)[order]


def network(scale: Scale) -> nn.Module:
    return surgeon_fx.zoo.create("resnet20_cifar", depth=scale.depth)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int = 32) -> None:
    steps = [chosen for _ in range(epochs) for chosen in torch.randperm(len(x)).split(batch) if len(chosen) == batch]
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=len(steps))
    for chosen in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()


def table(rows: list[list[str]], headers: list[str]) -> str:
    return tabulate(rows, headers, disable_numparse=True, colalign=["left"] + ["right"] * (len(headers) - 1))


def planned(name: str) -> str:
    """Memory of one training step, from shapes alone."""
    with torch.device("meta"):
        model = surgeon_fx.zoo.create(name)
    shape = surgeon_fx.zoo.input_shape(name)
    pruned = surgeon_fx.plan(surgeon_fx.transform(model), shape, ratios=0.9)
    plans = {"eager": surgeon_fx.plan(model, shape), "transformed, ratio 0.9": pruned}
    rows = [[title, f"{one.saved_bytes / MIB:.0f}", f"{one.peak_bytes / MIB:.0f}"] for title, one in plans.items()]
    return table(rows, [f"{name}, {'x'.join(map(str, shape))}", "held MiB", "peak MiB"])


def adapt_here(method: str, folder: str, scale: Scale) -> dict[str, float]:
    """Adapts to the stream in this process. Memory is of the last batch of each corruption, time of the others."""
    saved = torch.load(Path(folder) / "demo.pt")
    model = network(scale)
    model.load_state_dict(saved["weights"])
    adapter = adapt.METHODS[method](model, **({} if method in ("source", "bn_stat") else {"lr": LR}))
    meter, levels = Meter(CPU), []
    measurable = not peak_unavailable_reason(CPU)
    adapter.model.register_forward_hook(lambda *_: levels.append(meter.now()) if measurable else None)
    wrong, held, peaks, seconds = 0, [], [], []
    for images, labels in saved["stream"]:
        batches = list(zip(images.split(scale.batch), labels.split(scale.batch), strict=True))
        for i, (x, y) in enumerate(batches):
            measured = measurable and i == len(batches) - 1
            if measured:
                meter.forget()
                base = meter.now()
            levels.clear()
            begin = meter.clock()
            logits = adapter(x)
            if measured:
                held.append(max(levels) - base)
                peaks.append(meter.peaks(base)["peak"])
            else:
                seconds.append(meter.clock() - begin)
            wrong += int((logits.argmax(1) != y).sum())
    error = 100 * wrong / sum(len(labels) for _, labels in saved["stream"])
    memory = {"held": max(held), "peak": max(peaks)} if measurable else {}
    return {"error": error, "seconds": statistics.median(seconds), **memory}


def report(found: dict[str, dict[str, float]]) -> str:
    """The table, and the peaks as bars."""
    rows, bars = [], []
    for method, one in found.items():
        memory = [""] * 3
        if "peak" in one:
            share = one["peak"] / found["full"]["peak"]
            memory = [f"{one['held'] / MIB:.0f}", f"{one['peak'] / MIB:.0f}", f"{share:.2f}"]
            bars.append(f"{METHODS[method]:26} {'█' * round(BAR * share)} {memory[1]} MiB")
        rows.append([METHODS[method], f"{one['error']:.1f}", *memory, f"{one['seconds']:.2f}"])
    headers = ["method", "error %", "held MiB", "peak MiB", "of eager", "s per batch"]
    why = peak_unavailable_reason(CPU)
    note = f"not measured: {why}" if why else "resident, after forward and at its peak, net of the level before a batch"
    return "\n".join([table(rows, headers), f"memory: {note}", "", *bars])


def prepare(scale: Scale, folder: Path) -> str:
    """Trains the network and leaves it in a folder with the images it will meet; says what they are."""
    x, y = digits()
    count = scale.batch * scale.batches
    model = network(scale)
    train(model, x[:-count], y[:-count], scale.epochs)
    x, y = x[-count:], y[-count:]
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == y).float().mean().item()
    names = [*CORRUPTIONS][: scale.corruptions]
    stream = [(CORRUPTIONS[name](x).clamp(0, 1), y) for name in names]
    torch.save({"weights": model.state_dict(), "stream": stream}, folder / "demo.pt")
    return (
        f"ResNet-{scale.depth}, trained on digits: {100 * right:.1f} % of {count} it has not seen are right.\n"
        f"Now they come corrupted, in batches of {scale.batch}: {', '.join(names)}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller in every way: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the numbers of the methods alone, as JSON")
    commands.add_quiet(parser)
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    torch.manual_seed(0)
    if arguments.run:
        for _ in sys.stdin:  # when its turn has come
            print(json.dumps(adapt_here(*arguments.run, scale)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--run"]  # they start up while the rest goes on
        processes = [ChildProcess(method, [*command, method, folder]) for method in scale.methods]
        if not arguments.json:
            print(f"One training step, planned without running it:\n\n{planned(scale.planned)}\n", flush=True)
        introduction = prepare(scale, Path(folder))
        if not arguments.json:
            print(introduction, flush=True)
        found, progress = {}, commands.Progress(len(processes), arguments.quiet)
        for process in processes:
            progress.step(f"adapting: {METHODS[process.name]}")
            found[process.name] = process.ask("run")
            process.close()
    progress.close()
    print(json.dumps(found) if arguments.json else report(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
