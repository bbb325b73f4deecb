"""Methods on a transformed model: what backward needs is kept pruned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx.adapt.augment import augment as default_augment
from surgeon_fx.adapt.base import Adapter
from surgeon_fx.adapt.eager import NORM_LR, FullTuning
from surgeon_fx.adapt.shift import Shift
from surgeon_fx.api import is_transformed, ratios, transform
from surgeon_fx.importance import SAMPLES, Importance, importance_pass
from surgeon_fx.inputs import call
from surgeon_fx.kernels.layout import check_ratio
from surgeon_fx.losses import consistency, logits_of
from surgeon_fx.modules import Trains

CONSISTENCY = 0.01  # weight of the consistency term, per class


class StaticSparsity(FullTuning):
    """Full tuning with one ratio for every layer, as DropIT and BackRazor have it, in memory that is really freed.

    `train` and `loss` are as everywhere: "norm" and "eata" make it EATA on a transformed model.
    """

    def __init__(self, model: nn.Module, *, ratio: float = 0.9, **options: Any) -> None:
        super().__init__(_transformed(model), **options)
        self.ratio = check_ratio(ratio)

    def _learn(self, x: Any) -> Any:
        ratios(self.model).fill(self.ratio)
        return super()._learn(x)

    def _settings(self) -> str:
        return f", ratio {self.ratio:g}"


class Surgeon(Adapter):
    """Activations pruned layer by layer at ratios that follow the data (SURGEON, CVPR 2025, Algorithm 1).

    `norm_only` trains norm layers alone. `css` learns from certain predictions, the surest most; `cr` adds consistency
    with an augmented view of the batch, made by `augment` (default: for images with pixels in [0, 1]), one graph at a
    time. The importance pass runs on `samples` of a batch at `static_ratio`: before every batch, or every `every`-th
    (None: the first), and with `on_shift` when the inputs no longer look like those of the last pass (True, or the
    threshold of `adapt.shift.Shift`). A function as `loss` sees those samples too; in place of a named one, plain
    entropy does. `seed` is that of the samples chosen and of the augmentation.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        norm_only: bool = False,
        css: bool = False,
        cr: bool = False,
        samples: int | None = SAMPLES,
        static_ratio: float = 0.9,
        every: int | None = 1,
        on_shift: bool | float = False,
        augment: Callable[[Any, torch.Generator], Any] | None = None,
        train: Trains = None,
        lr: float | None = None,
        optimizer: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be 1 or more, or None for the first batch alone, got {every}")
        if samples is not None and samples < 1:
            raise ValueError(f"samples must be at least 1, or None for the whole batch, got {samples}")
        if css and ("loss" in options or "loss_fn" in options):
            raise ValueError("css chooses samples by their entropy and brings its own loss: leave out loss or css")
        if augment is not None and not cr:
            raise ValueError("augment is the view that cr compares with: set cr=True")
        if norm_only and train is not None:
            raise ValueError("norm_only says what is trained: leave out train")
        self.norm_only, self.css, self.cr = norm_only, css, cr
        self.samples, self.static_ratio = samples, check_ratio(static_ratio)
        self.every, self.shift = every, Shift() if on_shift is True else Shift(on_shift) if on_shift else None
        self.augment = augment or default_augment
        self.importance: Importance | None = None
        self.batches = 0
        self.generator = torch.Generator().manual_seed(seed)
        if lr is None and optimizer is None:
            lr = NORM_LR if norm_only else self.lr
        train = "norm" if norm_only else train
        if css:
            options["loss"] = "css"
        model = _transformed(model)
        ratios(model).fill(self.static_ratio)  # until the first pass has had its say
        super().__init__(model, lr=lr, optimizer=optimizer, train=train, **options)
        self._needs(bool(self.trained), "has nothing to train" + (": no norm layer has weights" if norm_only else ""))
        self._needs(not cr or self.loss.passes == 1, "compares views in one pass, and the loss takes two: leave out cr")

    def _learn(self, x: Any) -> Any:
        view = self.augment(x, self.generator) if self.cr else None  # first: it may refuse a batch
        due = self._due(x)
        if due:
            self.importance = importance_pass(
                self.model,
                x,
                lambda output: None if self._empty else self.loss.importance(output),
                ranks=self.ranks,
                samples=self.samples,
                static_ratio=self.static_ratio,
                generator=self.generator,
                scale=1.0 if self.scaler is None else self.scaler.get_scale(),
            )
        found = due and self.importance is not None and bool(self.importance.G)
        self.batches += 1
        output = self._learn_consistent(x, view) if self.cr else super()._learn(x)
        self.last = replace(self.last, refreshed=found)
        return output

    def _due(self, x: Any) -> bool:
        shifted = self.shift is not None and not self._empty and self.shift(x)
        if self.shift is not None and self.ranks is not None:  # a pass is one of all ranks
            shifted = bool(self.ranks.sum([shifted])[0])
        planned = not self.batches or (self.every is not None and self.batches % self.every == 0)
        if planned and self.shift is not None and not self._empty:
            self.shift.follow(x)
        return planned or shifted

    def _learn_consistent(self, x: Any, view: Any) -> Any:
        """Both views get their gradient, and only one graph is alive at a time: the other view stands in as numbers."""
        with torch.no_grad():
            other = logits_of(call(self.model, view)).clone()
        torch.clear_autocast_cache()  # casts made without gradients have none
        weight = CONSISTENCY * other.shape[1]

        def run(x: Any) -> tuple[Tensor, Any]:
            output = call(self.model, x)
            loss, term = self.loss.value(output, self.trained), weight * consistency(output, other)
            return term if loss is None else loss + term, output

        def run_view(view: Any) -> tuple[Tensor, Any]:
            output = call(self.model, view)
            return weight * consistency(fixed, output), output

        output, learns = self.learn(run, x)
        fixed = logits_of(output).detach()
        if learns:
            step, mean = self.last, self.mean_loss
            self.learn(run_view, view)
            self.last, self.mean_loss = step, mean  # the first tells of both
            self.update()
        return output

    def _own_state(self) -> dict[str, Any]:
        return {
            "ratios": dict(ratios(self.model)),
            "batches": self.batches,
            "generator": self.generator.get_state(),
            "shift": None if self.shift is None else self.shift.reference,
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        ratios(self.model).update(state["ratios"])
        self.batches = state["batches"]
        self.generator.set_state(state["generator"].cpu())
        self.importance = None
        if self.shift is not None:
            self.shift.reference = state["shift"]

    def _settings(self) -> str:
        chosen = [name for name in ("norm_only", "css", "cr") if getattr(self, name)]
        when = (
            "the first batch" if self.every is None else "every batch" if self.every == 1 else f"{self.every} batches"
        )
        return f", {', '.join([*chosen, f'refresh at {when}'])}" + (" and on shift" if self.shift else "")


def _transformed(model: nn.Module) -> nn.Module:
    return model if is_transformed(model) else transform(model)
