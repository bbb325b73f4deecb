"""Methods in plain eager autograd: forward only, and one loss by some of the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from surgeon_fx.adapt.base import Adapter
from surgeon_fx.adapt.losses import EataLoss, SarLoss
from surgeon_fx.adapt.statistics import adapting, batch_norms
from surgeon_fx.inputs import call
from surgeon_fx.losses import CERTAIN, predictions
from surgeon_fx.modules import Trains, blocks, checkpointed_blocks, last_stage, trains

NORM_LR = 1e-3  # norm layers bear more than the whole network does


def _nothing(name: str, parameter: nn.Parameter) -> bool:
    return False


class Source(Adapter):
    """The model as it is, in evaluation mode."""

    statistics = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, train=_nothing)


class BNStat(Adapter):
    """Batch norms use the statistics of the batch, mixed with the source's by `prior`; nothing is trained."""

    def __init__(self, model: nn.Module, *, prior: float = 0.0) -> None:
        super().__init__(model, train=_nothing, prior=prior)
        self._needs(bool(batch_norms(self.model)), "needs batch norm layers, and this model has none")


class FullTuning(Adapter):
    """Entropy of the predictions, by every parameter that requires a gradient, in plain eager autograd."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._needs(bool(self.trained), "has nothing to train: no parameter requires a gradient")


class Tent(Adapter):
    """Entropy of the predictions, by the weights and biases of norm layers (Wang et al., ICLR 2021), in eager."""

    lr = NORM_LR

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **{"train": "norm", **options})
        self._needs(bool(self.trained), "trains norm layers, and this model has none with weights: try FullTuning")


class Checkpointed(FullTuning):
    """Full tuning with gradient checkpointing: each block keeps its inputs alone and runs again in backward."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._needs(bool(blocks(model)), "found no blocks: modules of two layers or more in a Sequential or ModuleList")

    @contextlib.contextmanager
    def _adapting(self) -> Iterator[None]:
        with super()._adapting(), checkpointed_blocks(self.model):
            yield


class EATA(Tent):
    """Entropy of certain and new predictions, by norm layers, near weights that clean images rely on (ICML 2022).

    `fisher` is how much they do, as `find_fisher` finds it, or batches of clean images to find it on; None
    leaves the penalty out (ETA). `margin`, `d` and `alpha` are those of `EataLoss`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: Mapping[str, tuple[Tensor, Tensor]] | Iterable[Any] | None = None,
        margin: float = CERTAIN,
        d: float | None = None,
        alpha: float | None = None,
        train: Trains = "norm",
        **options: Any,
    ) -> None:
        if "loss" in options or "loss_fn" in options:
            raise ValueError("EATA brings its own loss: for another, use Tent(model, loss=...)")
        if fisher is not None and not isinstance(fisher, Mapping):
            fisher = find_fisher(model, fisher, train)
        loss = EataLoss(margin=margin, d=d, fisher=fisher, alpha=alpha)
        super().__init__(model, loss=loss, train=train, **options)


class SAR(Adapter):
    """Entropy of certain predictions at a flat minimum, by norm layers before the last stage (SAR, ICLR 2023).

    Two passes per batch; a model that has collapsed is reset. SGD with momentum; `lr` is by default 2.5e-4, and 1e-3
    for models without batch norm. `margin`, `rho` and `floor` are those of `SarLoss`.
    """

    lr, lr_without_batch_norm = 2.5e-4, 1e-3

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = CERTAIN,
        rho: float = 0.05,
        floor: float | None = None,
        train: Trains = None,
        lr: float | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        if "loss" in options or "loss_fn" in options:
            raise ValueError("SAR brings its own loss: for another, use Tent(model, loss=...)")
        if lr is None and optimizer is None and not batch_norms(model):
            lr = self.lr_without_batch_norm
        loss = SarLoss(margin=margin, rho=rho, floor=floor)
        train = norms_before_the_last_stage(model) if train is None else train
        super().__init__(model, loss=loss, train=train, lr=lr, optimizer=optimizer, **options)
        self._needs(
            bool(self.trained), "trains norm layers before the last stage, and there are none: try train='norm'"
        )

    def _usual_optimizer(self, parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def norms_before_the_last_stage(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    """SAR's choice of parameters: what the last stage has learnt is too particular to move."""
    norm, last = trains(model, "norm"), last_stage(model)
    return lambda name, parameter: norm(name, parameter) and name.rpartition(".")[0] not in last


def find_fisher(model: nn.Module, batches: Iterable[Any], train: Trains = "norm") -> dict[str, tuple[Tensor, Tensor]]:
    """How much predictions for clean images rely on each trained parameter, and its present value.

    The square of a batch's gradient of the cross entropy with the model's own predictions, averaged over the batches,
    in the state adapters work in. A batch is what the model is called with; of a list or a pair with labels, as
    loaders make them, the first entry.
    """
    chosen = trains(model, train)
    trained = {name: p for name, p in model.named_parameters() if chosen(name, p)}
    squares = {name: torch.zeros_like(p, requires_grad=False) for name, p in trained.items()}
    count = 0
    with torch.inference_mode(False), torch.enable_grad(), adapting(model, trained.values()):
        for batch in batches:
            rows = predictions(call(model, _images(batch)))
            loss = F.cross_entropy(rows, rows.argmax(1))
            grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for square, grad in zip(squares.values(), grads, strict=True):
                if grad is not None:
                    square += grad.square()
            count += 1
    if not count:
        raise ValueError("fisher needs at least one batch of clean images; None leaves the penalty out (ETA)")
    if not all(bool(torch.isfinite(square).all()) for square in squares.values()):
        raise ValueError("fisher is not finite: the model's gradients on these images are not")
    return {name: (square / count, trained[name].detach().clone()) for name, square in squares.items()}


def _images(batch: Any) -> Any:
    """A batch without its labels. Other tuples are a model's arguments."""
    pair = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
    labelled = pair and batch[1].dtype is torch.int64 and batch[1].dim() == 1
    return batch[0] if labelled or isinstance(batch, list) else batch
