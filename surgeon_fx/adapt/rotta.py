"""RoTTA (CVPR 2023): a teacher that learns from a class-balanced memory, for streams sorted by class."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx.adapt.augment import augment as default_augment
from surgeon_fx.adapt.base import Adapter, Step
from surgeon_fx.adapt.losses import check_shares
from surgeon_fx.adapt.norms import MovingNorm, RobustNorm, load_statistics, moving, statistics_of, swapped
from surgeon_fx.adapt.statistics import adapting, batch_norms
from surgeon_fx.api import is_transformed
from surgeon_fx.inputs import call
from surgeon_fx.losses import entropies, logits_of
from surgeon_fx.modules import Trains


@dataclass
class Item:
    """A sample in the memory, with its predicted class and its entropy when it came; its age in samples since."""

    sample: Tensor
    label: int
    entropy: float
    age: int = 0


class Memory:
    """At most `capacity` samples, classes in balance: what is old and uncertain goes first.

    A sample is as dispensable as 1 / (1 + exp(-age / capacity)) + H / ln C. A new one replaces the most dispensable of
    its class if that has its share, else of the largest classes if the memory is full, and only where that is more
    dispensable than itself.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: list[Item] = []

    def add(self, item: Item, classes: int) -> None:
        if self._make_room(item, classes):
            self.items.append(item)
        for one in self.items:
            one.age += 1

    def _make_room(self, item: Item, classes: int) -> bool:
        counts: dict[int, int] = {}
        for one in self.items:
            counts[one.label] = counts.get(one.label, 0) + 1
        if counts.get(item.label, 0) >= self.capacity / classes:
            among = {item.label}
        elif len(self.items) < self.capacity:
            return True
        else:
            among = {label for label, count in counts.items() if count == max(counts.values())}
        rivals = [one for one in self.items if one.label in among]
        worst = max(rivals, key=lambda one: self._dispensable(one, classes))
        if self._dispensable(worst, classes) <= self._dispensable(item, classes):
            return False
        self.items = [one for one in self.items if one is not worst]
        return True

    def _dispensable(self, item: Item, classes: int) -> float:
        return 1 / (1 + math.exp(-item.age / self.capacity)) + item.entropy / math.log(classes)


class RoTTA(Adapter):
    """Predictions of a teacher in evaluation mode; each `every` samples (default: `capacity`) one step on a memory.

    The student learns the teacher's predictions for the memory on an augmented view of it (`augment`, by default for
    pixels in [0, 1]), fresh samples weighted most; the teacher is its moving average. Both have batch norms whose
    statistics move by `norm_momentum` of the memory in that pass alone; the model's own stay what they are.
    """

    takes_ranks = False
    lr = 1e-3

    def __init__(
        self,
        model: nn.Module,
        *,
        capacity: int = 64,
        every: int | None = None,
        momentum: float = 0.999,
        norm_momentum: float = 0.05,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        train: Trains = "norm",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if "loss" in options or "loss_fn" in options:
            raise ValueError("RoTTA learns from its teacher: leave out loss")
        if capacity < 1 or (every is not None and every < 1):
            raise ValueError(f"capacity and every must be 1 or more, got {capacity} and {every}")
        check_shares(momentum=momentum, norm_momentum=norm_momentum)
        if is_transformed(model):
            raise ValueError("RoTTA brings norm layers of its own: give it the model as it was before transform")
        if options.get("prior"):
            raise ValueError("RoTTA's statistics follow its memory: leave out prior")
        self.every, self.momentum, self.augment = every or capacity, momentum, augment or default_augment
        self.generator = torch.Generator().manual_seed(seed)
        self.memory, self.samples = Memory(capacity), 0
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self.norms: dict[nn.Module, MovingNorm] = {n: RobustNorm(n, norm_momentum) for n in batch_norms(model)}
        self.teacher_norms: dict[nn.Module, MovingNorm] = {
            norm: RobustNorm(norm, norm_momentum) for norm in batch_norms(self.teacher)
        }
        super().__init__(model, train=train, **options)
        self._needs(bool(self.trained), "trains norm layers, and this model has none with weights: pass train=")

    @contextlib.contextmanager
    def _adapting(self) -> Iterator[None]:
        with (
            adapting(self.model, self.trained.values(), statistics=False),
            swapped(self.model, self.norms),
            swapped(self.teacher, self.teacher_norms),
        ):
            yield

    def _forward(self, x: Any) -> Any:
        with torch.no_grad():
            return call(self.teacher, x)

    def _learn(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise ValueError("RoTTA keeps samples in a memory: a batch must be a tensor")
        output = self._forward(x)
        logits = logits_of(output)
        if logits.dim() != 2:
            raise ValueError(f"RoTTA balances classes of samples, and scores of shape {tuple(logits.shape)} are maps")
        self.last = Step(skipped="the memory waits for more samples")
        for sample, label, found in zip(x, logits.argmax(1).tolist(), entropies(logits).tolist(), strict=True):
            if math.isfinite(found):
                self.memory.add(Item(sample.detach().clone(), label, found), logits.shape[1])
            self.samples += 1
            if self.samples % self.every == 0 and self.memory.items:
                self._learn_memory()
        return output

    def _learn_memory(self) -> None:
        self.zero_grad()
        x = torch.stack([item.sample for item in self.memory.items])
        age = torch.tensor([item.age / self.memory.capacity for item in self.memory.items]).to(x)
        with moving(self.norms), moving(self.teacher_norms):
            with torch.no_grad():
                target = logits_of(call(self.teacher, x)).softmax(1)
            found = logits_of(call(self.model, self.augment(x, self.generator))).log_softmax(1)
        weight = torch.exp(-age) / (1 + torch.exp(-age))
        self.backward((-(target * found).sum(1) * weight).mean())
        if not self.last.skipped and self.update():
            teacher = dict(self.teacher.named_parameters())
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    teacher[name].mul_(self.momentum).add_(parameter.detach(), alpha=1 - self.momentum)

    def _own_state(self) -> dict[str, Any]:
        return {
            "teacher": {name: parameter.detach() for name, parameter in self.teacher.named_parameters()},
            "statistics": statistics_of(self.norms),
            "teacher_statistics": statistics_of(self.teacher_norms),
            "memory": [asdict(item) for item in self.memory.items],
            "samples": self.samples,
            "generator": self.generator.get_state(),
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.teacher.named_parameters():
                parameter.copy_(state["teacher"][name])
        load_statistics(self.norms, state["statistics"])
        load_statistics(self.teacher_norms, state["teacher_statistics"])
        self.memory.items = [Item(**item) for item in state["memory"]]
        self.samples = state["samples"]
        self.generator.set_state(state["generator"].cpu())
