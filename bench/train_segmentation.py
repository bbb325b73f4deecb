"""Trains the zoo's small SegFormer on CamVid, for adaptation on road scenes.

    python bench/train_segmentation.py --data camvid --minutes 90
    python bench/train_segmentation.py --data camvid --score bench/weights/segformer_camvid.safetensors

The budget is processor time per thread, so that what else the machine does costs nothing. The learning rate falls with
the share of it that is spent, and the last epoch ends within it. A checkpoint is written every few epochs, and
`--resume` goes on from there with the time that is left. mIoU on the val split is printed on the way; the weights at
the end are written as half precision.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, ROOT
from safetensors.torch import save_file
from torch import Tensor, nn
from tta_folders import CAMVID_CLASSES, IGNORED, camvid_files, read_camvid
from tta_score import Score

from surgeon_fx import commands, zoo

MODEL = "segformer_camvid"
SCALES, COLOR = (0.75, 1.75), 0.3
WARM_UP = 0.05  # share of the budget


@dataclass(frozen=True)
class Images:
    """A split in memory: pixels and labels as bytes, in one size; labels in their own size for scoring."""

    x: Tensor
    y: Tensor
    whole: Tensor

    @staticmethod
    def read(root: Path, split: str, size: tuple[int, int], limit: int | None) -> Images:
        x, y = read_camvid(camvid_files(root, split)[:limit], size)
        small = F.interpolate(y[:, None].float(), size=size, mode="nearest")[:, 0]
        return Images((x * 255).round().to(torch.uint8), small.to(torch.uint8), y.to(torch.uint8))


def class_weights(labels: Tensor) -> Tensor:
    """Rare classes count more: 1 / ln(1.1 + share), over their mean."""
    counts = torch.bincount(labels[labels != IGNORED].long(), minlength=CAMVID_CLASSES).float()
    weights = 1 / torch.log(1.1 + counts / counts.sum())
    return weights / weights.mean()


def augment(x: Tensor, y: Tensor, crop: tuple[int, int], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """One image: another scale, a crop, a flip, other colors. What lies beyond the image does not count."""

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=random))

    scale = draw(*SCALES)
    size = [max(1, round(side * scale)) for side in x.shape[1:]]
    x = F.interpolate(x[None].float() / 255, size=size, mode="bilinear", align_corners=False)[0]
    y = F.interpolate(y[None, None].float(), size=size, mode="nearest")[0, 0].long()
    missing = [0, max(0, crop[1] - size[1]), 0, max(0, crop[0] - size[0])]
    x, y = F.pad(x, missing), F.pad(y, missing, value=IGNORED)
    top = int(torch.randint(0, y.shape[0] - crop[0] + 1, (), generator=random))
    left = int(torch.randint(0, y.shape[1] - crop[1] + 1, (), generator=random))
    x, y = x[:, top : top + crop[0], left : left + crop[1]], y[top : top + crop[0], left : left + crop[1]]
    if draw(0, 1) < 0.5:
        x, y = x.flip(2), y.flip(1)
    mean = x.mean()
    x = (x - mean) * draw(1 - COLOR, 1 + COLOR) + mean * draw(1 - COLOR, 1 + COLOR)
    x = x * (1 + 0.1 * (torch.rand(3, 1, 1, generator=random) - 0.5))
    return x.clamp(0, 1), y


@torch.no_grad()
def miou(model: nn.Module, images: Images, batch: int = 8) -> float:
    """Mean intersection over union in percent, at the labels' own size."""
    model.eval()
    score = Score(CAMVID_CLASSES, segmentation=True)
    for x, y in zip(images.x.split(batch), images.whole.split(batch), strict=True):
        score.add(model(x.float() / 255), y.long())
    return 100 - score.error


def rate_at(share: float) -> float:
    """The learning rate's factor when a share of the budget is spent: up in a line, down as half a cosine."""
    if share < WARM_UP:
        return max(share / WARM_UP, 1e-2)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP))))


class Training:
    """Model, optimizer, generator and the time they have had."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self.lr, self.budget, self.batch, self.crop = (
            arguments.lr,
            60 * arguments.minutes,
            arguments.batch,
            arguments.crop,
        )
        self.model = zoo.create(MODEL)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr)
        self.random = torch.Generator().manual_seed(arguments.seed)
        self.seconds, self.epoch = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "torch": torch.get_rng_state(),
            "seconds": self.seconds,
            "epoch": self.epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        torch.set_rng_state(state["torch"])
        self.seconds, self.epoch = state["seconds"], state["epoch"]

    @property
    def over(self) -> bool:
        return self.seconds >= self.budget

    def run_epoch(self, images: Images, weights: Tensor) -> float:
        """One pass over the images, or as much of it as the budget has; the mean loss."""
        self.model.train()
        order = torch.randperm(len(images.x), generator=self.random)
        losses = []
        for chosen in order[: len(order) // self.batch * self.batch].split(self.batch):
            begin = time.process_time()
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * rate_at(self.seconds / self.budget)
            made = [augment(images.x[i], images.y[i], self.crop, self.random) for i in chosen.tolist()]
            x, y = (torch.stack(part) for part in zip(*made, strict=True))
            logits = F.interpolate(self.model(x), size=y.shape[1:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(logits, y, weights, ignore_index=IGNORED)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
            self.seconds += (time.process_time() - begin) / torch.get_num_threads()
            if self.over:
                break
        self.epoch += 1
        return sum(losses) / len(losses)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.data.is_dir():
        raise ValueError(f"--data must be the folder of CamVid, and {arguments.data} is none")
    if arguments.minutes <= 0 or arguments.batch < 1 or arguments.every < 1:
        raise ValueError("--minutes must be above 0, --batch and --every 1 or more")
    if any(c > s for c, s in zip(arguments.crop, arguments.size, strict=True)):
        raise ValueError(f"--crop must not be larger than --size, got {arguments.crop} and {arguments.size}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.score is not None:
        val = Images.read(arguments.data, "val", arguments.size, arguments.limit)
        print(f"val mIoU of {arguments.score.name} {miou(zoo.load(MODEL, arguments.score), val):.2f} %")
        return 0
    train, val = (Images.read(arguments.data, split, arguments.size, arguments.limit) for split in ("train", "val"))
    if len(train.x) < arguments.batch:
        raise ValueError(f"--batch must not be above the number of images, {len(train.x)}")
    training, weights = Training(arguments), class_weights(train.y)
    checkpoint: Path = arguments.checkpoint
    if arguments.resume and checkpoint.exists():
        training.load_state_dict(torch.load(checkpoint, weights_only=True))
        print(f"goes on after epoch {training.epoch}, {training.seconds / 60:.1f} min")
    while not training.over:
        loss = training.run_epoch(train, weights)
        if training.epoch % arguments.every == 0 or training.over:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(training.state_dict(), checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
            found = f"loss {loss:.3f}, val mIoU {miou(training.model, val):.1f} %"
            print(f"epoch {training.epoch}: {found}, {training.seconds / 60:.1f} min")
            sys.stdout.flush()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.half().contiguous() for name, value in training.model.state_dict().items()}
    save_file(state, arguments.out)
    written = zoo.load(MODEL, arguments.out)
    print(f"val mIoU of the written weights {miou(written, val):.2f} %")
    print(f"wrote {arguments.out.name}, {arguments.out.stat().st_size / 1e6:.1f} MB")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of CamVid: train and val with images and labels"
    )
    parser.add_argument("--minutes", type=float, default=90, help="of processor time, evaluation apart (default 90)")
    parser.add_argument(
        "--size", type=commands.size, default=(240, 320), help="images are brought to (default 240x320)"
    )
    parser.add_argument("--crop", type=commands.size, default=(192, 256), help="trained on (default 192x256)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--every", type=int, default=10, help="epochs between checkpoints (default 10)")
    parser.add_argument("--limit", type=int, help="images of each split; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--checkpoint", type=Path, default=RESULTS / f"{MODEL}.pt")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, where there is one")
    parser.add_argument("--score", type=Path, metavar="WEIGHTS", help="train nothing: print the val mIoU of a file")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "weights" / f"{MODEL}.safetensors")
    return commands.answer(run, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
