"""Whether the inputs still look like those of the last importance pass, by a statistic that costs next to nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

THRESHOLD = 0.15


class Shift:
    """Tells when a stream changes: per channel, the spread of values, and of differences between neighbours.

    Each is compared as a Gaussian with that of the reference batch by the symmetric divergence
    ((v1 + d^2) / v2 + (v2 + d^2) / v1) / 2 - 1, averaged over channels; differences tell noise from blur where values
    alone do not. The first batch, and each one that is told as new, becomes the reference.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        if not threshold > 0:
            raise ValueError(f"the threshold of a shift must be above 0, got {threshold}")
        self.threshold = threshold
        self.reference: Tensor | None = None

    def __call__(self, inputs: Any) -> bool:
        found = _statistics(inputs)
        new = self.reference is None or not self.distance(self.reference.to(found.device), found) <= self.threshold
        if new:
            self.reference = found
        return new

    def follow(self, inputs: Any) -> None:
        """Takes a batch as the reference, new or not."""
        self.reference = _statistics(inputs)

    @staticmethod
    def distance(reference: Tensor, found: Tensor) -> float:
        """The larger of the divergences of values and of differences."""
        if reference.shape != found.shape:  # another number of channels
            return float("inf")
        (mean_a, var_a), (mean_b, var_b) = reference.unbind(1), found.unbind(1)
        apart = (mean_a - mean_b).square()
        both = ((var_a + apart) / var_b + (var_b + apart) / var_a) / 2 - 1
        return float(both.mean(-1).max())


@torch.no_grad()
def _statistics(inputs: Any) -> Tensor:
    """Mean and variance per channel, of values and of differences along the last dimension: 2 x 2 x channels."""
    x = next((x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1), None)
    if x is None:
        raise ValueError(
            "on_shift looks at numbers, and the inputs hold no floating-point tensor with a batch dimension"
        )
    x = x.detach().float()
    x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(1)
    found = [torch.var_mean(y, (0, 2), correction=0) for y in (x, x.diff(dim=2) if x.shape[2] > 1 else x)]
    return torch.stack([torch.stack((mean, variance + 1e-6)) for variance, mean in found])
