"""What every method shares: the step, its optimizer, what is trained, and the way back."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import SUPPORTED_NODES, tree_map_only

from surgeon_fx.adapt.losses import Loss, as_loss
from surgeon_fx.adapt.statistics import adapting
from surgeon_fx.api import is_transformed
from surgeon_fx.distributed import (
    check_reduced,
    is_empty,
    local,
    ranks_of,
    reshard,
    unwrapped,
    zero_loss,
    zeros_like,
)
from surgeon_fx.inputs import batch_size, call, on_one_device
from surgeon_fx.modules import Trains, trains


@dataclass(frozen=True)
class Step:
    """What one call did. `skipped` says why nothing was learnt, where nothing was."""

    loss: float | None = None
    skipped: str = ""
    refreshed: bool = False
    selected: int | None = None  # predictions the loss looked at, where it chooses
    reset: bool = False  # the method gave up on what it had learnt, and began again


class Adapter:
    """Takes a batch, adapts the model to it, and returns the predictions made on the way, before the update.

    A batch is a tensor, a tuple of arguments or a mapping of named ones. The model's own parameters are trained, and
    their `.grad` is None afterwards; modes, gradient flags and running statistics are the same after a call as before.
    Outside calls the model can be used as ever; it is moved to its device before the adapter is made.

    `optimizer` is an optimizer over `trained`, or a function that makes one of a list of parameters (default: Adam
    with `lr`); what it does not hold is not trained. `scheduler` is a scheduler, or makes one of the optimizer, and
    steps after every update. `loss` is a name in `surgeon_fx.adapt.LOSSES`, a `Loss`, or a function of what the model
    returns, whose None means that there is nothing to learn; `loss_fn` is another name for it. `train` says what is
    trained, as in `surgeon_fx.plan`. `prior` mixes source and batch statistics in batch norms, as if `prior` source
    samples were in the batch: for small batches; the mixture counts as constant in backward. `resettable=False` does
    without the copy of the trained parameters that `reset` needs. `scaler` is a `torch.amp.GradScaler`, for steps under
    float16 autocast.

    A model in `DistributedDataParallel`, or sharded by `fully_shard`, is adapted by all its ranks together: each calls
    its adapter with a batch of its own, and learns from the mean of those that have something to learn from. A rank
    whose batch is empty, whose loss is not finite, or that finds nothing to learn takes part without a gradient.
    """

    lr: float = 1e-4
    statistics = True  # batch norms see the batch
    takes_ranks = True  # whether its steps can be taken by several ranks together

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: Any = None,
        loss: str | Loss | Callable[[Any], Tensor | None] = "entropy",
        loss_fn: Callable[[Any], Tensor | None] | None = None,
        train: Trains = None,
        prior: float = 0.0,
        resettable: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if lr is not None and (optimizer is not None or not 0 <= lr < math.inf):
            raise ValueError("lr must not be negative, and is the optimizer's own where an optimizer is given")
        if not 0 <= prior < math.inf:
            raise ValueError(f"prior must be a number of samples, 0 or more, got {prior}")
        if loss_fn is not None and loss != "entropy":
            raise ValueError("loss and loss_fn are two names for one thing: give one of them")
        self.model, self.prior, self.resettable, self.scaler = model, prior, resettable, scaler
        self.ranks = ranks_of(model)
        self._needs(self.ranks is None or self.takes_ranks, "adapts in one process, and the model is on several ranks")
        reshard(model)
        self.loss = as_loss(loss if loss_fn is None else loss_fn)
        chosen = trains(model, train)
        self.trained = {name: p for name, p in model.named_parameters() if chosen(name, p)}
        check_reduced(model, self.trained)
        self.optimizer = self._optimizer(optimizer, self.lr if lr is None else lr)
        self.scheduler = self._scheduler(scheduler)
        self.last = Step()
        self.mean_loss = 0.0  # of the last step, over the ranks that had one
        self._warned = self._empty = False
        self.loss.check(self)
        self._remember()

    def _remember(self) -> None:
        """Takes the present state as the one to go back to."""
        with torch.inference_mode(False):
            self._initial = copy.deepcopy(self.state_dict()) if self.resettable else None

    def _optimizer(self, given: Any, lr: float) -> Optimizer | None:
        parameters = list(self.trained.values())
        if not parameters:
            return None
        if not isinstance(given, Optimizer):
            return self._usual_optimizer(parameters, lr) if given is None else given(parameters)
        known = {id(p) for group in given.param_groups for p in group["params"]}
        self.trained = {name: p for name, p in self.trained.items() if id(p) in known}
        if not self.trained:
            raise ValueError("optimizer holds none of the parameters that are trained; pass a function that makes one")
        return given

    def _usual_optimizer(self, parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return torch.optim.Adam(parameters, lr=lr)

    def _scheduler(self, given: Any) -> Any:
        if self.optimizer is None or given is None:
            return None
        made = given(self.optimizer) if callable(given) else given
        if getattr(made, "optimizer", self.optimizer) is not self.optimizer:
            raise ValueError("scheduler must be one of the adapter's optimizer; pass a function that makes it")
        return made

    def __call__(self, x: Any) -> Any:
        x = self._batch(x)
        with torch.inference_mode(False), self._adapting(), torch.set_grad_enabled(bool(self.trained)):
            x = _apart(x)
            self.zero_grad()
            try:
                output = self._learn(x) if self.trained else self._forward(x)
            finally:
                self.zero_grad()
                reshard(self.model)
        return self._returned(output)

    @torch.no_grad()
    def predict(self, x: Any) -> Any:
        """The predictions for a batch as the adapter would make them, without learning from it."""
        x = self._batch(x)
        with torch.inference_mode(False), self._adapting():
            return self._returned(self._forward(_apart(x)))

    def _batch(self, x: Any) -> Any:
        """What the model is called with: of several ranks, one without samples takes part with a sample of zeros."""
        self._empty = self.ranks is not None and is_empty(x)
        x = zeros_like(x) if self._empty else x
        batch_size(x)
        reshard(self.model)
        return x

    def _returned(self, output: Any) -> Any:
        return detached(output, (lambda t: t[:0]) if self._empty else Tensor.detach)

    def _adapting(self) -> contextlib.AbstractContextManager[None]:
        return adapting(self.model, self.trained.values(), self.statistics, self.prior)

    def _forward(self, x: Any) -> Any:
        """The predictions, as a call makes them."""
        return call(self.model, x)

    def _learn(self, x: Any) -> Any:
        """What a call does: by default one step of the loss."""
        return self.loss.step(self, x)

    def learn(self, run: Callable[[Any], tuple[Tensor | None, Any]], x: Any) -> tuple[Any, bool]:
        """Forward and backward of a batch; the output, and whether there is something to go on from, on any rank.

        `run` takes the batch to a loss and an output.
        """
        state = None if self.ranks is None else copy.deepcopy(self.loss.state_dict())
        loss, output = run(x)
        if self.ranks is None:
            self.backward(loss)
            return output, not self.last.skipped
        reason = self._nothing_in(loss)
        broken = reason.startswith("the loss is")
        value = float("nan") if loss is None else float(loss.detach())
        learners, spoilt, total = self.ranks.sum([not reason, broken, 0.0 if reason else value])
        self.last = Step(None if loss is None else value, reason, selected=self.loss.selected)
        if not learners:
            return output, False
        self.mean_loss = total / learners
        if spoilt:  # no gradient of what is not finite is zero: those ranks take part with zeros, and so all run again
            self.loss.load_state_dict(state)  # type: ignore[arg-type]
            loss, again = run(zeros_like(x) if broken else x)
        else:
            again = output
        if reason:
            loss = zero_loss(again)
        elif learners < self.ranks.size:
            assert loss is not None
            loss = loss * (self.ranks.size / learners)  # the wrapper divides by all ranks
        del again
        assert loss is not None
        self._scaled(loss).backward()
        return output, True

    def backward(self, loss: Tensor | None) -> None:
        """Backward from a loss that has something to say; `last` says how it went."""
        reason = self._nothing_in(loss)
        value = None if loss is None else float(loss.detach())
        self.last = Step(value, reason, selected=self.loss.selected)
        if not reason:
            assert loss is not None
            assert value is not None
            self.mean_loss = value
            self._scaled(loss).backward()

    def _nothing_in(self, loss: Tensor | None) -> str:
        """Why there is nothing to learn from a loss; empty if there is."""
        if self._empty:
            return "the batch is empty"
        if loss is None:
            return "no sample was chosen"
        value = float(loss.detach())
        if math.isfinite(value):
            return ""
        self._warn(f"the loss is {value}: the model is left as it is")
        return f"the loss is {value}"

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def has_finite_gradient(self) -> bool:
        """Whether there is a gradient and all of it is finite; `last` says so where it is not."""
        grads = [local(p.grad) for p in self.trained.values() if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in grads if g.numel()]
        norms = [torch.linalg.vector_norm(x, math.inf) for x in values]
        finite = not norms or bool(torch.isfinite(on_one_device(norms)).all())
        if self.ranks is not None:
            finite = not self.ranks.sum([not finite])[0]
        if not finite:
            if self.scaler is None:
                self._warn("a gradient is not finite: the model is left as it is")
            else:  # the same on every rank, whichever of them saw it
                self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            self.last = replace(self.last, skipped="a gradient is not finite")
            return False
        return bool(grads)

    def update(self) -> bool:
        """Steps, unless there is no gradient or one that is not finite. Whether it did."""
        if not self.has_finite_gradient():
            return False
        assert self.optimizer is not None
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        torch.clear_autocast_cache()  # of casts of what the weights were
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self.mean_loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        return True

    def zero_grad(self) -> None:
        """Of all that the optimizer would step."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                parameter.grad = None

    def recover(self) -> None:
        """`reset` in the middle of a step: `last` still tells of that step, and that it was undone."""
        step, warned = self.last, self._warned
        self.reset()
        self.last, self._warned = replace(step, reset=True), warned

    def _warn(self, message: str) -> None:
        """Once an adapter: `last.skipped` says it every time."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"{type(self).__name__}: {message}", stacklevel=4)

    def reset(self) -> None:
        """Back to where the adapter began: parameters, optimizer, scheduler and the method's own state."""
        if self._initial is None:
            raise ValueError("this adapter was made with resettable=False: it kept nothing to go back to")
        self.load_state_dict(self._initial)
        self.last, self._warned = Step(), False

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on from here with the same model elsewhere."""
        return {
            "method": type(self).__name__,
            "trained": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "loss": self.loss.state_dict(),
            **self._own_state(),
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("method") != type(self).__name__:
            raise ValueError(f"state must be of {type(self).__name__}, got one of {state.get('method')}")
        if state["trained"].keys() != self.trained.keys():
            different = state["trained"].keys() ^ self.trained.keys()
            raise ValueError(f"state must hold what is trained; different: {', '.join(sorted(different)[:3])}")
        parts = [(getattr(self, part), state.get(part)) for part in ("optimizer", "scheduler", "scaler")]
        if any((own is None) != (saved is None) for own, saved in parts):
            raise ValueError("state must be of an adapter with the same optimizer, scheduler and scaler")
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["trained"][name])
        for own, saved in parts:
            if own is not None:
                own.load_state_dict(copy.deepcopy(saved))
        self.loss.load_state_dict(state["loss"])
        self._load_own_state(state)

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        pass

    def _needs(self, what: bool, message: str) -> None:
        if not what:
            raise ValueError(f"{type(self).__name__} {message}")

    def __repr__(self) -> str:
        count, total = (sum(p.numel() for p in ps) for ps in (self.trained.values(), self.model.parameters()))
        kind = "transformed " if is_transformed(self.model) else ""
        return (
            f"{type(self).__name__}({kind}{type(unwrapped(self.model)).__name__}, trains {count:,} of {total:,} "
            f"parameters in {len(self.trained)} tensors{self._settings()})"
        )

    def _settings(self) -> str:
        return ""


def _apart(x: Any) -> Any:
    """A batch without its history. Tensors made in inference mode cannot be saved for backward: those are copied."""
    x = dict(x) if isinstance(x, Mapping) else x
    return tree_map_only(Tensor, lambda t: cast(Tensor, t.clone() if t.is_inference() else t.detach()), x)


def detached(output: Any, each: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """What the model returned, without its graph: tensors in containers, dictionaries and data classes of any type."""
    if isinstance(output, Tensor):
        return each(output.detach())
    if is_dataclass(output) and not isinstance(output, (type, Mapping)):
        return replace(output, **{f.name: detached(getattr(output, f.name), each) for f in fields(output) if f.init})
    if isinstance(output, dict) and not _is_node(output):
        new = copy.copy(output)
        new.update({key: detached(value, each) for key, value in output.items()})
        return new
    return tree_map_only(Tensor, lambda t: each(t.detach()), output)


def _is_node(output: Any) -> bool:
    return type(output) in SUPPORTED_NODES
