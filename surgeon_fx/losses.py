"""Losses that need no labels."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

CERTAIN = 0.4  # of the largest entropy possible: below it a sample counts as certain (EATA's margin)


def logits_of(output: Any) -> Tensor:
    """The class scores among what a model returns: classes along dimension 1."""
    if isinstance(output, Tensor):
        return output
    key = _key_of(output)
    found = None if key is None else output[key] if isinstance(output, (dict, tuple, list)) else getattr(output, key)
    if not isinstance(found, Tensor):
        raise ValueError(
            "the model must return class scores: a tensor, a tuple that starts with one, or a dict or an object with "
            "'logits' or 'out'; pass a loss of your own otherwise"
        )
    return found


def with_logits(output: Any, logits: Tensor) -> Any:
    """What a model returned, with other class scores in their place."""
    logits_of(output)
    key = _key_of(output)
    if isinstance(output, Tensor):
        return logits
    if isinstance(output, dict):
        new = copy.copy(output)
        new[key] = logits
        return new
    if isinstance(output, (tuple, list)):
        make = getattr(output, "_make", type(output))  # named tuples take their values one by one
        return make([logits, *output[1:]])
    new = copy.copy(output)
    setattr(new, str(key), logits)
    return new


def _key_of(output: Any) -> Any:
    """Where the class scores are; None where there are none."""
    if isinstance(output, (tuple, list)):
        return 0 if output else None
    has = output.__contains__ if isinstance(output, dict) else partial(hasattr, output)
    return next((key for key in ("logits", "out") if has(key)), None)


def predictions(output: Any) -> Tensor:
    """Class scores, a row for each prediction: one per sample, or one per pixel where the scores are maps."""
    logits = logits_of(output)
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


def entropies(output: Any) -> Tensor:
    """The entropy of each prediction: one per sample, or one per pixel where the scores are maps."""
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
