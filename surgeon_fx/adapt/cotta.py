"""CoTTA (CVPR 2022): a student that learns from a slow teacher's view of many views, and forgets a little."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgeon_fx.adapt.augment import augment as default_augment
from surgeon_fx.adapt.base import Adapter
from surgeon_fx.adapt.losses import by_classes, check_not_negative, check_shares
from surgeon_fx.adapt.statistics import adapting
from surgeon_fx.inputs import call
from surgeon_fx.losses import consistency, logits_of, with_logits

# For images by number of classes: the confidence below which the teacher looks at many views, the share of weights
# that goes back to the source each step, and whether the loss is symmetric.
PUBLISHED = {10: (0.92, 0.01, False), 100: (0.72, 0.01, False), 1000: (0.1, 0.001, True)}
PIXEL_CONFIDENCE = 0.69
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def _log(probabilities: Tensor) -> Tensor:
    """Finite: a class without any probability gets the least there is."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


class CoTTA(Adapter):
    """The student learns from a teacher, its moving average, and weights go back to the source's at random.

    Images: where the source model's mean confidence is below `confidence`, the target is the mean of the teacher's
    logits over `views` augmented copies of the batch (`augment`, by default for pixels in [0, 1]), else its logits of
    the batch itself. Maps of class scores: each pixel has the teacher's most likely class, where the source model's
    confidence is above `confidence` at the image's own scale, else on average over seven scales and their mirror
    images. `momentum` is the teacher's, `restore` the share of weights set back in each step. What is returned are the
    targets. `confidence`, `restore` and `symmetric` (cross entropy both ways) are by default those published for the
    nearest number of classes. Teacher and source model run without a graph.
    """

    takes_ranks = False
    lr = 1e-3

    def __init__(
        self,
        model: nn.Module,
        *,
        confidence: float | None = None,
        restore: float | None = None,
        symmetric: bool | None = None,
        momentum: float = 0.999,
        views: int = 32,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if "loss" in options or "loss_fn" in options:
            raise ValueError("CoTTA learns from its teacher: leave out loss")
        if views < 1:
            raise ValueError(f"views must be 1 or more, got {views}")
        check_shares(momentum=momentum, restore=restore)
        check_not_negative(confidence=confidence)
        self.confidence, self.restore, self.symmetric = confidence, restore, symmetric
        self.momentum, self.views, self.augment = momentum, views, augment or default_augment
        self.generator = torch.Generator().manual_seed(seed)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.anchor = copy.deepcopy(model).requires_grad_(False)
        super().__init__(model, **options)
        self._needs(bool(self.trained), "has nothing to train: no parameter requires a gradient")
        source = dict(self.anchor.named_parameters())
        self._source = {name: source[name].detach() for name in self.trained}
        if self._initial is not None:
            self._initial["trained"] = self._source  # one copy for the anchor, `restore` and `reset`

    @contextlib.contextmanager
    def _adapting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(super()._adapting())
            for model in (self.teacher, self.anchor):
                stack.enter_context(adapting(model, (), self.statistics, self.prior))
            yield

    def _forward(self, x: Any) -> Any:
        drawn = self.generator.get_state()  # what is only predicted leaves no trace
        output, target = self._target(x)
        self.generator.set_state(drawn)
        return with_logits(output, target)

    def _learn(self, x: Any) -> Any:
        output, target = self._target(x)
        logits = logits_of(call(self.model, x))
        self.backward(self._distance(logits, target))
        del logits
        if not self.last.skipped and self.update():
            self._follow()
            self._forget(target.shape[1])
        return with_logits(output, target)

    def _distance(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.dim() > 2:
            return F.cross_entropy(logits, target.argmax(1))
        symmetric = by_classes(target.shape[1], PUBLISHED)[2] if self.symmetric is None else self.symmetric
        loss = consistency(target, logits)
        return 0.5 * loss + 0.5 * consistency(logits, target) if symmetric else loss

    @torch.no_grad()
    def _target(self, x: Any) -> tuple[Any, Tensor]:
        """What the teacher returned for the batch, and the logits to learn."""
        output = call(self.teacher, x)
        logits = logits_of(output)
        sure = logits_of(call(self.anchor, x)).softmax(1).amax(1)
        if logits.dim() > 2:
            return output, self._pixels(x, logits, sure)
        least = by_classes(logits.shape[1], PUBLISHED)[0] if self.confidence is None else self.confidence
        if sure.mean() >= least:
            return output, logits
        total = torch.zeros_like(logits)
        for _ in range(self.views):
            total += logits_of(call(self.teacher, self.augment(x, self.generator)))
        return output, total / self.views

    def _pixels(self, x: Any, logits: Tensor, sure: Tensor) -> Tensor:
        """Log probabilities: of the batch as it is where the source is sure, else the mean over scales and flips."""
        known = sure > (PIXEL_CONFIDENCE if self.confidence is None else self.confidence)
        own = logits.softmax(1)
        if known.all():
            return _log(own)
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError("CoTTA scales and flips images: a batch must be a tensor N x C x H x W")
        total = torch.zeros_like(own)
        for scale in SCALES:
            size = [round(scale * side) for side in x.shape[2:]]
            scaled = x if scale == 1 else F.interpolate(x, size=size, mode="bilinear", align_corners=False)
            for flip in (False, True):
                seen = logits_of(call(self.teacher, scaled.flip(3) if flip else scaled)).softmax(1)
                seen = seen.flip(3) if flip else seen
                total += F.interpolate(seen, size=own.shape[2:], mode="bilinear", align_corners=False)
        return _log(torch.where(known.unsqueeze(1), own, total / (2 * len(SCALES))))

    @torch.no_grad()
    def _follow(self) -> None:
        teacher = dict(self.teacher.named_parameters())
        for name, parameter in self.trained.items():
            teacher[name].mul_(self.momentum).add_(parameter.detach(), alpha=1 - self.momentum)

    @torch.no_grad()
    def _forget(self, classes: int) -> None:
        share = by_classes(classes, PUBLISHED)[1] if self.restore is None else self.restore
        for name, parameter in self.trained.items():
            lost = (torch.rand(parameter.shape, generator=self.generator) < share).to(parameter.device)
            parameter.copy_(torch.where(lost, self._source[name], parameter))

    def _own_state(self) -> dict[str, Any]:
        teacher = {name: parameter.detach() for name, parameter in self.teacher.named_parameters()}
        return {"teacher": teacher, "generator": self.generator.get_state()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.teacher.named_parameters():
                parameter.copy_(state["teacher"][name])
        self.generator.set_state(state["generator"].cpu())
