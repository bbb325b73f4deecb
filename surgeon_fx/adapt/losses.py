"""The losses that adapters learn from, by name: one list for eager methods and for transformed models alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from surgeon_fx.distributed import is_dtensor, local
from surgeon_fx.inputs import call, on_one_device
from surgeon_fx.losses import CERTAIN, certain_entropy, entropies, entropy, logits_of, predictions

if TYPE_CHECKING:
    from surgeon_fx.adapt.base import Adapter

MOVING = 0.9  # share of the past in moving averages
T = TypeVar("T")


def by_classes(classes: int, published: Mapping[int, T]) -> T:
    """A published setting: that of the number of classes nearest in size."""
    return published[min(published, key=lambda known: abs(math.log(known / classes)))]


def check_shares(**shares: float | None) -> None:
    """ValueError where one that is given is not from 0 to 1."""
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {share}")


def check_not_negative(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0 <= number < math.inf:
            raise ValueError(f"{name} must be a number, 0 or more, got {number}")


class Loss:
    """What a step learns from.

    `value` is the loss of one output; None says that there is nothing to learn. `step` is what an adapter does with a
    batch: one forward, one backward, one update, unless a loss needs more (`passes`). `importance` is what SURGEON's
    importance pass differentiates: plain entropy, as a choice of samples may be empty.
    """

    passes = 1
    selected: int | None = None  # predictions the last `value` chose, where it chooses

    def value(self, output: Any, trained: Mapping[str, nn.Parameter]) -> Tensor | None:
        raise NotImplementedError

    def importance(self, output: Any) -> Tensor | None:
        return entropy(output)

    def step(self, adapter: Adapter, x: Any) -> Any:
        def run(x: Any) -> tuple[Tensor | None, Any]:
            output = call(adapter.model, x)
            return self.value(output, adapter.trained), output

        output, learns = adapter.learn(run, x)
        if learns:
            adapter.update()
        return output

    def check(self, adapter: Adapter) -> None:
        """Raises where the loss cannot work with an adapter."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class FunctionLoss(Loss):
    """A function of what the model returns."""

    def __init__(self, function: Callable[[Any], Tensor | None]) -> None:
        self.function = function

    def value(self, output: Any, trained: Mapping[str, nn.Parameter]) -> Tensor | None:
        return self.function(output)

    def importance(self, output: Any) -> Tensor | None:
        return self.function(output)


class CertainLoss(Loss):
    """SURGEON's CSS: the entropy of certain predictions, the surest weighted most."""

    def value(self, output: Any, trained: Mapping[str, nn.Parameter]) -> Tensor | None:
        loss, self.selected = certain_entropy(output)
        return loss


class EataLoss(Loss):
    """Entropy of predictions that are certain and unlike those before (EATA, ICML 2022).

    Chosen are those of entropy H < E0 = `margin` ln C and, once there is a moving mean of the probabilities chosen so
    far, of |cosine| with it below `d`; they weigh exp(E0 - H). With a `fisher` (see `surgeon_fx.adapt.find_fisher`),
    `alpha` times the sum of fisher * (w - w0)^2 is added. `d` and `alpha` are by default those published for the
    nearest number of classes.
    """

    PUBLISHED_D = {10: 0.4, 100: 0.1, 1000: 0.05}  # noqa: RUF012
    PUBLISHED_ALPHA = {10: 1.0, 100: 1.0, 1000: 2000.0}  # noqa: RUF012

    def __init__(
        self,
        *,
        margin: float = CERTAIN,
        d: float | None = None,
        fisher: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        alpha: float | None = None,
    ) -> None:
        check_not_negative(margin=margin, d=d, alpha=alpha)
        self.margin, self.d, self.fisher, self.alpha = margin, d, fisher, alpha
        self.mean: Tensor | None = None  # of the probabilities chosen so far

    def value(self, output: Any, trained: Mapping[str, nn.Parameter]) -> Tensor | None:
        found = entropies(output).flatten()
        rows = predictions(output).detach().softmax(1)
        classes = rows.shape[1]
        limit = self.margin * math.log(classes)
        chosen = found.detach() < limit
        if self.mean is not None:
            d = by_classes(classes, self.PUBLISHED_D) if self.d is None else self.d
            alike = torch.cosine_similarity(self.mean.to(rows)[None], rows, dim=1).abs()
            chosen &= alike < d
        self.selected = int(chosen.sum())
        if not self.selected:
            return None
        now = rows[chosen].mean(0)
        self.mean = now if self.mean is None else MOVING * self.mean.to(now) + (1 - MOVING) * now
        kept = found[chosen]
        loss = (kept * torch.exp(limit - kept.detach())).mean()
        return loss if self.fisher is None else loss + self._penalty(trained, classes)

    def _penalty(self, trained: Mapping[str, nn.Parameter], classes: int) -> Tensor:
        assert self.fisher is not None
        alpha = by_classes(classes, self.PUBLISHED_ALPHA) if self.alpha is None else self.alpha
        terms = [
            (weight * (trained[name] - start).square()).sum()
            for name, (weight, start) in self.fisher.items()
            if name in trained
        ]
        return alpha * torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def check(self, adapter: Adapter) -> None:
        if self.fisher is not None and not any(name in adapter.trained for name in self.fisher):
            raise ValueError("fisher must be of parameters that are trained, by name, and has none of them")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = None if state["mean"] is None else state["mean"].clone()


class SarLoss(Loss):
    """Entropy of certain predictions, at the sharpest point near the weights (SAR, ICLR 2023).

    Two passes: the gradient of the mean entropy over those with H < E0 = `margin` ln C moves the weights by
    rho g / ||g||; the update is by the gradient there, of those chosen first that are certain there too. A moving mean
    of the second loss below `floor` (default: 0.2 for a thousand classes, in proportion to ln C) says that the
    predictions have collapsed, and the adapter is reset.
    """

    passes = 2
    FLOOR, FLOOR_CLASSES = 0.2, 1000

    def __init__(self, *, margin: float = CERTAIN, rho: float = 0.05, floor: float | None = None) -> None:
        check_not_negative(margin=margin, rho=rho)
        self.margin, self.rho, self.floor = margin, rho, floor
        self.mean: float | None = None  # of second losses

    def value(self, output: Any, trained: Mapping[str, nn.Parameter]) -> Tensor | None:
        found = entropies(output)
        chosen = found[found.detach() < self._limit(output)]
        self.selected = chosen.numel()
        return chosen.mean() if self.selected else None

    def step(self, adapter: Adapter, x: Any) -> Any:
        certain: list[Tensor] = []

        def first(x: Any) -> tuple[Tensor | None, Any]:
            output = call(adapter.model, x)
            certain[:] = [entropies(output).detach() < self._limit(output)]
            return self.value(output, adapter.trained), output

        def second(x: Any) -> tuple[Tensor | None, Any]:
            output = call(adapter.model, x)
            return self._second(output, certain[0]), output

        output, learns = adapter.learn(first, x)
        if learns and adapter.has_finite_gradient():
            moved = self._climb(adapter)
            try:
                _, learns = adapter.learn(second, x)
            finally:
                with torch.no_grad():
                    for parameter, start in moved:
                        parameter.copy_(start)
            if learns and adapter.update():
                self._follow(adapter, logits_of(output).shape[1])
        return output

    def _limit(self, output: Any) -> float:
        return self.margin * math.log(logits_of(output).shape[1])

    @torch.no_grad()
    def _climb(self, adapter: Adapter) -> list[tuple[nn.Parameter, Tensor]]:
        """Moves the weights by rho along the gradient, and clears that; what they were."""
        own = [parameter for parameter in adapter.trained.values() if parameter.grad is not None]
        norm = on_one_device(torch.linalg.vector_norm(local(p.grad)) for p in own if p.grad is not None).norm()
        if adapter.ranks is not None and any(is_dtensor(parameter) for parameter in own):
            norm = norm.new_tensor(math.sqrt(adapter.ranks.sum([float(norm) ** 2])[0]))
        before = [(parameter, parameter.detach().clone()) for parameter in own]
        for parameter in own:
            assert parameter.grad is not None
            local(parameter).add_(local(parameter.grad) * (self.rho / (norm + 1e-12)).to(parameter.device))
        torch.clear_autocast_cache()  # of casts of what the weights were
        adapter.zero_grad()
        return before

    def _second(self, output: Any, certain: Tensor) -> Tensor | None:
        found = entropies(output)[certain]
        found = found[found.detach() < self._limit(output)]
        return found.mean() if found.numel() else None

    def _follow(self, adapter: Adapter, classes: int) -> None:
        second = adapter.mean_loss
        self.mean = second if self.mean is None else MOVING * self.mean + (1 - MOVING) * second
        floor = self.FLOOR * math.log(classes) / math.log(self.FLOOR_CLASSES) if self.floor is None else self.floor
        if self.mean < floor:
            adapter.recover()

    def check(self, adapter: Adapter) -> None:
        if not adapter.resettable:
            raise ValueError("the loss of SAR resets a model that has collapsed: leave out resettable=False")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]


LOSSES: dict[str, Callable[[], Loss]] = {
    "entropy": lambda: FunctionLoss(entropy),
    "css": CertainLoss,
    "eata": EataLoss,
    "sar": SarLoss,
}


def as_loss(given: str | Loss | Callable[[Any], Tensor | None]) -> Loss:
    """A loss by name, of a function, or as it is."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str):
        if given not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)} or a function, got {given!r}")
        return LOSSES[given]()
    if not callable(given):
        raise TypeError(f"loss must be a name, a Loss or a function of what the model returns, got {given!r}")
    return FunctionLoss(given)
