"""A callback for Lightning.

from surgeon_fx.integrations.lightning import SurgeonCallback
trainer = lightning.Trainer(callbacks=[SurgeonCallback(module="net", ratio=0.9)])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from surgeon_fx.integrations.pruning import Pruning
from surgeon_fx.losses import entropy
from surgeon_fx.modules import is_layer


def second_of_a_pair(batch: Any) -> Any:
    """The targets of a batch of inputs and targets; None of any other."""
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None


class SurgeonCallback(Callback):
    """Trains a LightningModule in less memory; see `surgeon_fx.integrations.pruning.Pruning` for the other options.

    `module` is the name of the part that `training_step` calls, by default the LightningModule itself, or its only
    part with layers where it has no forward. `targets` takes a batch to the targets of an importance pass, whose
    `loss_fn(output, targets)` is by default the cross entropy; without targets, `loss_fn(output)` is the entropy.
    """

    def __init__(
        self, *, module: str | None = None, targets: Callable[[Any], Any] = second_of_a_pair, **options: Any
    ) -> None:
        self.pruning, self.module, self.targets = Pruning(**options), module, targets

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and any(map(is_layer, pl_module.modules())):  # before a strategy wraps or shards it
            self._begin(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pruning.model is None:  # its layers were made by configure_model
            self._begin(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.pruning.refresh_every
        if every is not None and trainer.global_step and trainer.global_step % every == 0:
            self.pruning.refresh(entropy, self.targets(batch))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pruning.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.pruning.end()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        self.pruning.precision = half.get(str(trainer.precision))
        self.pruning.begin(self._part(pl_module))

    def _part(self, pl_module: LightningModule) -> nn.Module:
        if self.module is not None:
            return pl_module.get_submodule(self.module)
        if type(pl_module).forward is not LightningModule.forward:
            return pl_module
        parts = [part for part in pl_module.children() if any(map(is_layer, part.modules()))]
        if len(parts) != 1:
            raise ValueError(
                "module must name the part that training_step calls: the LightningModule has no forward, and "
                f"{len(parts)} parts with layers"
            )
        return parts[0]
