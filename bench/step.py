"""Memory and time of one adaptation step, as the kernel counts them: each tier in a process of its own.

    python bench/step.py --model tv:resnet50 --batch 16 --ratio 0.9

Held is the resident set after forward, peak its high-water mark through forward and backward, both net of the level
before the step, with weights and gradients already there. Eager runs with glibc's own settings, as its users run it;
the other tiers with what `surgeon_fx.transform` sets. Times are medians over `--repeats` steps after one uncounted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS
from tabulate import tabulate
from torch import nn

import surgeon_fx

MIB = 1 << 20


def create(name: str) -> nn.Module:
    if name.startswith("tv:"):
        import torchvision

        return torchvision.models.get_model(name[3:], weights=None)
    import timm

    return timm.create_model(name)


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(tier: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    model, x = create(arguments.model).train(), torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    if tier in ("exact", "pruned"):
        model = surgeon_fx.transform(model)
        surgeon_fx.ratios(model).fill(arguments.ratio if tier == "pruned" else 0.0)

    def step() -> tuple[int, float, float]:
        begin = time.perf_counter()
        out = model(x)
        loss = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()
        del out
        forward = time.perf_counter()
        held = status_bytes("VmRSS")
        if tier != "no_grad":
            loss.backward()
        return held, forward - begin, time.perf_counter() - forward

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.set_grad_enabled(tier != "no_grad"):
        step()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        base = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        steps = [step() for _ in range(arguments.repeats)]
    return {
        "tier": tier,
        "held_bytes": median(held for held, _, _ in steps) - base,
        "peak_bytes": status_bytes("VmHWM") - base,
        "forward_s": median(forward for _, forward, _ in steps),
        "backward_s": median(backward for _, _, backward in steps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tv:resnet50", help="a timm name, or tv: and a torchvision name")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--tiers", default="eager,no_grad,exact,pruned")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "step.jsonl")
    parser.add_argument("--in-process", metavar="TIER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        print(json.dumps(measure(arguments.in_process, arguments)))
        return 0
    rows = []
    for tier in arguments.tiers.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--in-process", tier]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{tier}: {result.stderr[-2000:]}")
        rows.append({"model": arguments.model, "batch": arguments.batch, **json.loads(result.stdout.splitlines()[-1])})
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eager = rows[0]
    seconds = eager["forward_s"] + eager["backward_s"]
    table = [
        {
            "tier": row["tier"],
            "held MiB": round(row["held_bytes"] / MIB),
            "of first": f"{row['held_bytes'] / eager['held_bytes']:.2f}",
            "peak MiB": round(row["peak_bytes"] / MIB),
            "of first ": f"{row['peak_bytes'] / eager['peak_bytes']:.2f}",
            "forward s": f"{row['forward_s']:.2f}",
            "backward s": f"{row['backward_s']:.2f}",
            "step of first": f"{(row['forward_s'] + row['backward_s']) / seconds:.2f}",
        }
        for row in rows
    ]
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.threads} threads, ratio {arguments.ratio}")
    print(tabulate(table, headers="keys"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
