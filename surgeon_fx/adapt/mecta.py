"""MECTA (ICLR 2023): norm layers that decide for themselves how much to learn, and cache few channels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surgeon_fx.adapt.eager import Tent
from surgeon_fx.adapt.norms import MectaNorm, load_statistics, moving, statistics_of, swapped
from surgeon_fx.adapt.statistics import adapting, batch_norms
from surgeon_fx.api import is_transformed
from surgeon_fx.kernels.layout import check_ratio


class MECTA(Tent):
    """TENT, or with `loss="eata"` EATA, over batch norms of the kind of `MectaNorm`.

    `ratio` of the channels are dropped from what backward keeps, and layers whose statistics move by no more than
    `threshold` are frozen. Statistics follow the stream; the model's own stay what they are. SGD with momentum.
    `cache_bytes` is what the method's authors count as its memory: the channels its norms keep, and nothing else.
    """

    takes_ranks = False
    lr = 2.5e-3

    def __init__(
        self, model: nn.Module, *, ratio: float = 0.7, threshold: float = 0.00125, seed: int = 0, **options: Any
    ) -> None:
        if is_transformed(model):
            raise ValueError("MECTA brings norm layers of its own: give it the model as it was before transform")
        if options.get("prior"):
            raise ValueError("MECTA's statistics follow the stream: leave out prior")
        self.generator = torch.Generator().manual_seed(seed)
        check_ratio(ratio)
        self.norms: dict[nn.Module, MectaNorm] = {
            norm: MectaNorm(norm, ratio, threshold, self.generator) for norm in batch_norms(model)
        }
        super().__init__(model, **options)
        self._needs(bool(self.norms), "needs batch norm layers, and this model has none")

    @property
    def cache_bytes(self) -> int:
        return sum(norm.cache_bytes for norm in self.norms.values())

    @contextlib.contextmanager
    def _adapting(self) -> Iterator[None]:
        with adapting(self.model, self.trained.values(), statistics=False), swapped(self.model, self.norms):
            yield

    def _forward(self, x: Any) -> Any:
        """As a call makes them, with statistics that follow the batch, and go back."""
        before = self._own_state()
        try:
            with moving(self.norms):
                return super()._forward(x)
        finally:
            self._load_own_state(before)

    def _learn(self, x: Any) -> Any:
        with moving(self.norms):
            return super()._learn(x)

    def update(self) -> bool:
        if all(norm.frozen for norm in self.norms.values()):
            self.last = replace(self.last, skipped=self.last.skipped or "every norm layer is frozen")
            return False
        return super().update()

    def _usual_optimizer(self, parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def _own_state(self) -> dict[str, Any]:
        return {"statistics": statistics_of(self.norms), "generator": self.generator.get_state()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        load_statistics(self.norms, state["statistics"])
        self.generator.set_state(state["generator"].cpu())
