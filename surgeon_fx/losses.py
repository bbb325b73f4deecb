"""Losses that need no labels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

CERTAIN = 0.4  # of the largest entropy possible: below it a sample counts as certain (EATA's margin)


def logits_of(output: Any) -> Tensor:
    """The class scores among what a model returns: classes along dimension 1."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = next((output[key] for key in ("logits", "out") if key in output), None)
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, Tensor):
        raise ValueError(
            "the model must return class scores: a tensor, a tuple that starts with one, or a dict with "
            "'logits' or 'out'; pass a loss_fn of your own otherwise"
        )
    return output


def entropies(output: Any) -> Tensor:
    """The entropy of each prediction: one a sample, or one a pixel where the scores are maps."""
    logits = logits_of(output)
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise ValueError(f"class scores must be of two classes or more, along dimension 1, got {tuple(logits.shape)}")
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def entropy(output: Any) -> Tensor:
    """The mean entropy of the predictions, over samples and pixels."""
    return entropies(output).mean()


def certain_entropy(output: Any) -> tuple[Tensor | None, int]:
    """The entropy of certain predictions, the surest weighted most, and how many there are; None where none is."""
    found = entropies(output)
    margin = CERTAIN * math.log(logits_of(output).shape[1])
    chosen = found[found < margin]
    if not chosen.numel():
        return None, 0
    return (chosen * torch.exp(margin - chosen.detach())).mean(), chosen.numel()


def consistency(output: Any, view: Any) -> Tensor:
    """How far the predictions for another view are from those for the sample: cross entropy, gradient to both."""
    return -(logits_of(output).softmax(1) * logits_of(view).log_softmax(1)).sum(1).mean()
