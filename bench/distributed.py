"""What a rank holds, planned and measured, and planned for up to 1,024 ranks.

torchrun --nproc-per-node 2 bench/distributed.py            measured under DDP and fully_shard beside the plan
python bench/distributed.py                                 the same on one rank
python bench/distributed.py --extrapolate --model vit_large_patch16_224 --batch 16
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surgeon_fx
from surgeon_fx import commands
from surgeon_fx.distributed import local
from surgeon_fx.modules import blocks
from surgeon_fx.retained import retained_bytes, storages

PARTS = ("weights", "gradients", "optimizer", "activations")
MIB = 1 << 20


def shard(model: nn.Module) -> nn.Module:
    for block in blocks(model).values():
        fully_shard(block)
    return fully_shard(model)


def measured(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """Bytes of one rank, by the storages that are there."""
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    activations = retained_bytes(output := model(x), model)
    output.sum().backward()
    states = [local(value) for state in optimizer.state.values() for value in state.values() if value.dim()]
    groups = {
        "weights": [*(local(p) for p in model.parameters()), *model.buffers()],
        "gradients": [local(p.grad) for p in model.parameters() if p.grad is not None],
        "optimizer": states,
    }
    return {name: sum(storages(tensors).values()) for name, tensors in groups.items()} | {"activations": activations}


def compare(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    size, rows = dist.get_world_size(), []
    for sharding, wrap in (("none", DistributedDataParallel), ("full", shard)):
        for ratio in (None, 0.0, 0.9):
            torch.manual_seed(0)
            model = surgeon_fx.zoo.create(arguments.model)
            if ratio is not None:
                model = surgeon_fx.transform(model, surgeon_fx.Config(capture=False))
                surgeon_fx.ratios(model).fill(ratio)
            model = wrap(model)
            x = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
            plan = surgeon_fx.plan(model, x, world_size=size, sharding=sharding).rank
            found = measured(model, x)
            name = "eager" if ratio is None else f"ratio {ratio:g}"
            rows += [
                [
                    size,
                    sharding,
                    name,
                    part,
                    f"{getattr(plan, part):,}",
                    f"{found[part]:,}",
                    found[part] - getattr(plan, part),
                ]
                for part in PARTS
            ]
    if dist.get_rank() == 0:
        headers = ["ranks", "sharding", "model", "bytes of", "planned", "measured on rank 0", "difference"]
        print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    dist.destroy_process_group()
    return 0


def extrapolate(arguments: argparse.Namespace) -> int:
    with torch.device("meta"):
        model = surgeon_fx.zoo.create(arguments.model)
    shape = (arguments.batch, 3, arguments.size, arguments.size)
    rows = []
    for name, ratio in (("eager", None), ("ratio 0.9", 0.9)):
        one = model if ratio is None else surgeon_fx.transform(model, surgeon_fx.Config(capture=False))
        for sharding in ("none", "optimizer", "full"):
            for size in (1, 2, 8, 64, 1024):
                plan = surgeon_fx.plan(one, shape, ratios=ratio, world_size=size, sharding=sharding).rank
                cells = [f"{getattr(plan, part) / MIB:,.0f}" for part in (*PARTS, "communication", "total")]
                rows.append([name, sharding, size, size * arguments.batch, *cells])
    headers = ["model", "sharding", "ranks", "batch of all", *PARTS, "communication", "total MiB"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    parser = commands.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20_cifar")
    parser.add_argument("--batch", type=commands.count, default=32, help="of a rank")
    parser.add_argument(
        "--size", type=commands.count, default=None, help="of images (default: 224 to extrapolate, 32 to measure)"
    )
    parser.add_argument("--extrapolate", action="store_true", help="plan for up to 1,024 ranks; nothing runs")
    chosen = parser.parse_args()
    chosen.size = chosen.size or (224 if chosen.extrapolate else 32)
    raise SystemExit(commands.answer(extrapolate if chosen.extrapolate else compare, chosen))
