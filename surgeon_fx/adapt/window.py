"""Samples that come one by one: predictions within a sliding window, an update each time it has been renewed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgeon_fx.adapt.base import Adapter, Step, detached
from surgeon_fx.adapt.statistics import batch_norms
from surgeon_fx.losses import logits_of, with_logits


class Window:
    """An adapter for batches of one: the last `size` samples stand in for a batch.

    Each sample is predicted among those before it, whose statistics batch norms need; models without batch norm see it
    alone. Every `size` samples the adapter learns from the window.
    """

    def __init__(self, adapter: Adapter, size: int = 16) -> None:
        if size < 1:
            raise ValueError(f"size must be 1 or more, got {size}")
        self.adapter, self.size = adapter, size
        self.samples: list[Tensor] = []
        self.count = 0
        self.last = Step()

    @property
    def model(self) -> torch.nn.Module:
        return self.adapter.model

    def __call__(self, x: Tensor) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or len(x) != 1:
            raise ValueError("a window takes one sample at a time: a tensor with a batch dimension of 1")
        self.samples = [*self.samples, x.detach()][-self.size :]
        self.count += 1
        if self.count % self.size == 0:
            batch = torch.cat(self.samples)
            output = self.adapter(batch)
            self.last = self.adapter.last
        else:
            batch = torch.cat(self.samples) if batch_norms(self.adapter.model) else x
            output = self.adapter.predict(batch)
            self.last = Step(skipped="the window waits for more samples")
        output = with_logits(output, logits_of(output)[-1:])  # also in an object that is no container
        return detached(output, lambda t: t[-1:] if t.dim() and len(t) == len(batch) else t)

    def reset(self) -> None:
        self.adapter.reset()
        self.samples, self.count, self.last = [], 0, Step()

    def state_dict(self) -> dict[str, Any]:
        return {"adapter": self.adapter.state_dict(), "samples": self.samples, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adapter.load_state_dict(state["adapter"])
        self.samples, self.count = list(state["samples"]), state["count"]

    def __repr__(self) -> str:
        return f"Window({self.adapter!r}, size {self.size})"
