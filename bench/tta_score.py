"""The error of predictions on a stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = 255  # the label of pixels that do not count


class Score:
    """The error of predictions in percent, so far: of images, or 1 - mIoU of pixels."""

    def __init__(self, classes: int, segmentation: bool) -> None:
        self.classes, self.segmentation = classes, segmentation
        self._counts = torch.zeros(classes, classes, dtype=torch.int64) if segmentation else torch.zeros(2)

    def add(self, logits: Tensor, y: Tensor) -> float:
        """Counts one batch, and returns its own error."""
        found = self._pixels(logits.cpu(), y) if self.segmentation else self._images(logits.cpu(), y)
        self._counts = self._counts + found
        return self._error(found)

    @property
    def error(self) -> float:
        return self._error(self._counts)

    def _images(self, logits: Tensor, y: Tensor) -> Tensor:
        if logits.ndim != 2 or logits.shape[0] != len(y):
            raise ValueError(f"the model must give one row of logits an image, got {tuple(logits.shape)}")
        if logits.shape[1] < self.classes:
            raise ValueError(f"the model tells {logits.shape[1]} classes apart, and labels have {self.classes}")
        wrong = (logits.argmax(1) != y).sum().item()
        return torch.tensor([wrong, len(y)])

    def _pixels(self, logits: Tensor, y: Tensor) -> Tensor:
        if logits.ndim != 4 or logits.shape[1] != self.classes:
            raise ValueError(f"the model must give {self.classes} logits per pixel, got {tuple(logits.shape)}")
        if logits.shape[2:] != y.shape[1:]:
            logits = F.interpolate(logits.float(), size=y.shape[1:], mode="bilinear", align_corners=False)
        known = y != IGNORED
        pairs = y[known] * self.classes + logits.argmax(1)[known]
        return torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def _error(self, counts: Tensor) -> float:
        if not self.segmentation:
            return 100 * counts[0].item() / max(counts[1].item(), 1)
        hit = counts.diagonal().double()
        union = counts.sum(0) + counts.sum(1) - hit
        there = union > 0
        return 100 * (1 - (hit[there] / union[there]).mean().item()) if there.any() else 0.0
