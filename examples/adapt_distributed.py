"""Adapt one model on several ranks, each with a stream of its own: torchrun --nproc-per-node 2 adapt_distributed.py

`--shard` uses `fully_shard` (FSDP2) in place of `DistributedDataParallel`. Gloo on a CPU here; nccl by the same code.
"""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surgeon_fx
from surgeon_fx import adapt

parser = argparse.ArgumentParser()
parser.add_argument("--shard", action="store_true")
parser.add_argument("--batches", type=int, default=5)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same weights everywhere
sizes = (3, 16, 32, 64)
blocks = [
    nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    for before, after in itertools.pairwise(sizes)
]
model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))  # or yours
model = surgeon_fx.transform(model)  # transform first,
if arguments.shard:  # then shard or wrap
    for block in model[: len(blocks)]:
        fully_shard(block)
    model = fully_shard(model)
else:
    model = DistributedDataParallel(model)
adapter = adapt.Surgeon(model, lr=1e-3, every=2)

stream = torch.Generator().manual_seed(1 + rank)  # each rank sees images of its own
for i in range(arguments.batches):
    x = torch.rand(8, 3, 32, 32, generator=stream)
    if i == 3 and rank == 1:
        x = x[:0]  # a rank that has run out of images takes part without a gradient
    logits = adapter(x)
    print(f"rank {rank}, batch {i}: {tuple(logits.shape)}, {adapter.last.skipped or f'loss {adapter.last.loss:.4f}'}")


def gathered(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


mine = (
    {name: gathered(p.detach()).sum().item() for name, p in model.named_parameters()},
    dict(surgeon_fx.ratios(model)),
)
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if rank == 0:
    for what, values in zip(("parameters", "ratios"), zip(*everyone, strict=True), strict=True):
        print(f"{what} are equal on both ranks: {all(one == values[0] for one in values)}")
    print(surgeon_fx.plan(model, (8, 3, 32, 32), world_size=len(everyone), sharding="full").rank)
dist.destroy_process_group()
