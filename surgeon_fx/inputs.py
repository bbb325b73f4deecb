"""What a model is called with: a tensor, a tuple of arguments, or a mapping of named ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def first_tensor(values: Any) -> Tensor | None:
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return next((x for x in leaves if isinstance(x, Tensor)), None)


def batch_size(inputs: Any) -> int:
    """Samples in a batch: along the first dimension of the first tensor."""
    x = first_tensor(inputs)
    if x is None or not x.dim():
        raise ValueError("inputs must hold a tensor with a batch dimension")
    if not x.shape[0]:
        raise ValueError(f"a batch must hold at least one sample, got shape {tuple(x.shape)}")
    return x.shape[0]


def on_one_device(numbers: Iterable[Tensor]) -> Tensor:
    """Single numbers side by side, whatever devices they are on."""
    found = list(numbers)
    return torch.stack([x.to(found[0].device) for x in found])
