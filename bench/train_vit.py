"""Trains the zoo's small vision transformer on CIFAR-10, for adaptation without batch norm.

    python bench/train_vit.py --data cifar10_train_jpeg.npz --test CIFAR-10-C

The training images come as JPEG bytes in one array, with offsets and labels (docs/benchmarks.md says how to make it).
Accuracy is printed after every epoch, on
`clean.npy` and `labels.npy` of the test folder; the weights of the last epoch are written as half precision.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from tta_folders import read_images

from surgeon_fx import zoo
from surgeon_fx.zoo.layers import ImageNormalizer

MODEL = "vit_cifar"
PADDING = 2  # of the random crop


def normalise(pixels: Tensor) -> Tensor:
    return ImageNormalizer(zoo.entry(MODEL).mean, zoo.entry(MODEL).std)(pixels.float() / 255)


def augment(x: Tensor) -> Tensor:
    """A random crop and a random flip for each image."""
    n, _, height, width = x.shape
    padded = F.pad(x, [PADDING] * 4)
    top, left = torch.randint(0, 2 * PADDING + 1, (2, n, 1, 1))
    rows = top + torch.arange(height).view(1, -1, 1)
    columns = left + torch.arange(width).view(1, 1, -1)
    columns = torch.where(torch.rand(n, 1, 1) < 0.5, columns, columns.flip(2))
    return padded[torch.arange(n).view(-1, 1, 1), :, rows, columns].permute(0, 3, 1, 2)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = sum((model(normalise(x)).argmax(1) == y).sum().item() for x, y in batches(images, labels, 500))
    return right / len(labels)


def batches(images: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(images.split(size), labels.split(size), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an .npz of data, offsets, labels")
    parser.add_argument("--test", type=Path, required=True, help="a folder with clean.npy and labels.npy")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "weights" / f"{MODEL}.safetensors")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    images, labels = read_images(arguments.data)
    test = torch.from_numpy(np.load(arguments.test / "clean.npy")).permute(0, 3, 1, 2)
    test_labels = torch.from_numpy(np.load(arguments.test / "labels.npy")).long()
    model = zoo.create(MODEL)
    steps = arguments.epochs * (len(labels) // arguments.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=steps + 1, pct_start=0.15)
    begin = time.perf_counter()
    for epoch in range(arguments.epochs):
        model.train()
        order = torch.randperm(len(labels))[: len(labels) // arguments.batch * arguments.batch]
        losses = []
        for chosen in tqdm(order.split(arguments.batch), desc=f"epoch {epoch + 1}", file=sys.stderr, mininterval=5):
            loss = F.cross_entropy(model(augment(normalise(images[chosen]))), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        clean = accuracy(model, test, test_labels)
        minutes = (time.perf_counter() - begin) / 60
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, clean test accuracy {clean:.1%}, {minutes:.1f} min")
        sys.stdout.flush()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in model.state_dict().items()}, arguments.out)
    print(f"wrote {arguments.out.name}, {arguments.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
