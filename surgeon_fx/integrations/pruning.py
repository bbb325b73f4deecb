"""What callbacks of trainers share: a model transformed in place, its ratios, the batch it was last called with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx.api import MARK, check_model, install, is_transformed, ratios, uninstall
from surgeon_fx.config import Config
from surgeon_fx.distributed import all_ranks
from surgeon_fx.importance import SAMPLES, Importance, importance_pass
from surgeon_fx.kernels.layout import check_ratio
from surgeon_fx.planner import fit, plan

log = logging.getLogger("surgeon_fx")
HALF_SCALE = 2.0**10  # of the loss of an importance pass in float16: ratios do not depend on it


class Pruning:
    """Options of a callback, and what it does.

    `ratio` is one for every layer; `budget` is how many bytes backward may hold ("2GiB"), met by `surgeon_fx.fit` at
    the first batch. With `refresh_every` an importance pass follows every so many optimizer steps, on `samples` of the
    last batch; with a budget, ratios then meet the budget in proportion to the importance. Without any of them ratios
    stay 0: exact. `loss_fn` is what a pass differentiates. `config` and `filter_fn` are those of
    `surgeon_fx.transform`. The plan is printed at the first batch unless `print_plan=False`. At the end of training the
    model is as it was, unless `keep=True`.
    """

    def __init__(
        self,
        *,
        ratio: float | None = None,
        budget: str | int | None = None,
        refresh_every: int | None = None,
        samples: int | None = SAMPLES,
        static_ratio: float = 0.9,
        loss_fn: Callable[..., Tensor | None] | None = None,
        config: Config | None = None,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        print_plan: bool = True,
        keep: bool = False,
    ) -> None:
        if ratio is not None and budget is not None:
            raise ValueError("ratio and budget both say what is kept: give one of them")
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(f"refresh_every must be a number of steps, 1 or more, got {refresh_every}")
        self.ratio, self.budget = None if ratio is None else check_ratio(ratio), budget
        self.refresh_every, self.samples, self.static_ratio = refresh_every, samples, check_ratio(static_ratio)
        self.loss_fn, self.config, self.filter_fn = loss_fn, config, filter_fn
        self.print_plan, self.keep = print_plan, keep
        self.model: nn.Module | None = None
        self.importance: Importance | None = None
        self.batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # what the model was last trained on
        self.precision: torch.dtype | None = None  # of autocast around the model, which plans and passes must know
        self._ours = self._busy = self._planned = False
        self._handle: Any = None

    def begin(self, model: nn.Module) -> None:
        """Transforms a model in place, unless it is transformed already."""
        if self.model is model:
            return
        if not is_transformed(model):
            check_model(model)
            install(model, self.config or Config(), self.filter_fn)
            self._ours = True
        if self.ratio is not None:
            ratios(model).fill(self.ratio)
        self.model, self._planned = model, False
        self._handle = model.register_forward_pre_hook(_Seen(self), with_kwargs=True)

    def end(self) -> None:
        """The model as it was."""
        if self._handle is not None:
            self._handle.remove()
        if self.model is not None and self._ours and not self.keep and MARK in self.model.__dict__:
            uninstall(self.model)
        self.model = self.batch = self._handle = None
        self._ours = False

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of a training batch; the first is planned, and fitted to the budget."""
        if self._busy or not torch.is_grad_enabled():
            return
        self.batch = (args, kwargs)
        if not self._planned:
            self._planned = True
            self._fit()
            if self.print_plan and is_first_rank():
                assert self.model is not None
                with self._context():
                    print(plan(self.model, *args, **kwargs), flush=True)

    def refresh(self, loss_fn: Callable[..., Tensor | None], targets: Any = None) -> None:
        """An importance pass on the last batch, and ratios by it."""
        if self.model is None or self.batch is None:
            return
        args, kwargs = self.batch
        if args and kwargs:
            raise ValueError("refresh_every takes models that are called with positional or with named arguments")
        self._busy = True
        try:
            with self._context():
                self.importance = importance_pass(
                    self.model,
                    kwargs or (args if len(args) > 1 else args[0]),
                    self.loss_fn or loss_fn,
                    ranks=all_ranks(self.model),
                    targets=targets,
                    samples=self.samples,
                    static_ratio=self.static_ratio,
                    scale=HALF_SCALE if self.precision is torch.float16 else 1.0,
                )
            self._fit()
        finally:
            self._busy = False

    def _fit(self) -> None:
        if self.budget is None:
            return
        assert self.model is not None
        assert self.batch is not None
        args, kwargs = self.batch
        importance = self.importance.I if self.importance is not None and self.importance.I else None
        with self._context():
            found = fit(self.model, *args, budget=self.budget, importance=importance, **kwargs)
        ratios(self.model).update(found.ratios)
        log.info("%s", found)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        assert self.model is not None
        if self.precision is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, self.precision, cache_enabled=False)


class _Seen:
    """The hook that sees batches. A copy of the model, such as a plan makes, has one that sees nothing."""

    def __init__(self, pruning: Pruning | None) -> None:
        self.pruning = pruning

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.pruning is not None:
            self.pruning.see(args, kwargs)

    def __deepcopy__(self, memo: Any) -> _Seen:
        return _Seen(None)

    def __reduce__(self) -> Any:
        return _Seen, (None,)


def is_first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0
