"""A callback for the Hugging Face Trainer.

from surgeon_fx.integrations.hf import SurgeonCallback
trainer = Trainer(model, args, train_dataset=data, callbacks=[SurgeonCallback(budget="2GiB", refresh_every=50)])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon_fx.integrations.pruning import Pruning


def model_loss(output: Any) -> Tensor:
    """The loss that a Hugging Face model returns for a batch with labels."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError("the model returned no loss: give SurgeonCallback a loss_fn of what it returns")
    return loss


class SurgeonCallback(TrainerCallback):
    """Trains the Trainer's model in less memory; see `surgeon_fx.integrations.pruning.Pruning` for the options.

    The model is transformed in place when the Trainer is made, before it is wrapped or sharded, and is an ordinary
    model of its own class again when training ends: checkpoints and `save_pretrained` are those of that class.
    """

    def __init__(self, **options: Any) -> None:
        self.pruning = Pruning(**options)

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if model is not None:
            self._begin(args, model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError("the Trainer would use nn.DataParallel: start a process per device, with torchrun")
        if model is not None:
            self._begin(args, model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        every = self.pruning.refresh_every
        if every is not None and state.global_step % every == 0:
            self.pruning.refresh(model_loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.pruning.end()

    def _begin(self, args: TrainingArguments, model: nn.Module) -> None:
        self.pruning.precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self.pruning.begin(model)
