"""EcoTTA (CVPR 2023): small networks beside a frozen one, warmed up on labelled source data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from surgeon_fx.adapt.augment import jitter
from surgeon_fx.adapt.base import Adapter
from surgeon_fx.adapt.losses import FunctionLoss
from surgeon_fx.adapt.statistics import adapting, batch_norms
from surgeon_fx.api import is_transformed
from surgeon_fx.inputs import call
from surgeon_fx.losses import CERTAIN, entropies, logits_of
from surgeon_fx.modules import blocks

DROPS, DROP = (0.3, 0.6, 0.8), 0.2  # of the warm-up's learning rate: where, as shares of the epochs, and to how much


class Shape(NamedTuple):
    """What goes into a part and comes out: channels, and the ratio of the sides."""

    c_in: int
    c_out: int
    stride: int


class MetaPart(nn.Module):
    """norm(F(x)) + ReLU(norm(conv(x))) for a frozen part F; the norms use the batch's statistics alone."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        c_in, c_out, stride = shape
        self.conv = nn.utils.skip_init(nn.Conv2d, c_in, c_out, 3, stride, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, generator=generator)
        self.conv_norm = nn.BatchNorm2d(c_out, track_running_stats=False)
        self.norm = nn.BatchNorm2d(c_out, track_running_stats=False)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        return self.norm(out) + F.relu(self.conv_norm(self.conv(x)))


class EcoTTA(Adapter):
    """Trains small convolutional parts beside a frozen network; `warm_up` teaches them on labelled source data first.

    The network's blocks are cut into `parts`: as many, of equal length with the rest in the last, or of the lengths
    given (published: 2, 2, 2, 2, 4 for WRN-28, 2, 2, 4, 4, 4 for ResNet-50). A call makes two updates: by `weight`
    times the mean distance of each part from the frozen one, one part's graph at a time; and by the mean entropy of
    predictions with H < `margin` ln C, which are those that it returns. The model itself never changes.
    """

    takes_ranks = False
    lr = 5e-3

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: int | Sequence[int] = 5,
        weight: float = 0.25,
        margin: float = CERTAIN,
        seed: int = 0,
        lr: float | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: Any = None,
        **options: Any,
    ) -> None:
        if is_transformed(model):
            raise ValueError("EcoTTA works on the model as it was before transform: its blocks stay frozen")
        if set(options) & {"train", "loss", "loss_fn"}:
            raise ValueError("EcoTTA says itself what is trained and by which loss: leave out train and loss")
        if isinstance(optimizer, Optimizer):
            raise ValueError("optimizer must be a function: what EcoTTA trains is made by warm_up")
        self.weight, self.margin = weight, margin
        self.generator = torch.Generator().manual_seed(seed)
        self.meta = nn.ModuleList()
        self.shapes: list[Shape] = []
        self._given = (optimizer, self.lr if lr is None else lr, scheduler)
        self._seen: dict[int, Tensor] = {}
        self._at: Callable[[int, Tensor, Tensor], Tensor] = self._beside  # what is done at a part's end
        loss = FunctionLoss(self._certain)
        super().__init__(model, lr=lr, loss=loss, train=lambda name, parameter: False, **options)
        self._parts = self._cut(parts)

    def _cut(self, parts: int | Sequence[int]) -> list[tuple[nn.Module, nn.Module]]:
        """The first and the last block of each part."""
        found = list(blocks(self.model).values())
        if isinstance(parts, int):
            self._needs(
                0 < parts <= len(found), f"cuts the blocks of a network into {parts} parts, and found {len(found)}"
            )
            each = len(found) // parts
            lengths = [*[each] * (parts - 1), len(found) - each * (parts - 1)]
        else:
            lengths = list(parts)
            fits = sum(lengths) == len(found) and all(length > 0 for length in lengths)
            self._needs(fits, f"has parts of {lengths} blocks, and the network has {len(found)}")
        starts = [sum(lengths[:k]) for k in range(len(lengths))]
        cut = [(found[start], found[start + length - 1]) for start, length in zip(starts, lengths, strict=True)]
        self._needs(
            all(any(batch_norms(block) for block in found[s : s + n]) for s, n in zip(starts, lengths, strict=True)),
            "is for convolutional networks with batch norm in every part",
        )
        return cut

    def __call__(self, x: Any) -> Any:
        self._check_warm()
        return super().__call__(x)

    def predict(self, x: Any) -> Any:
        self._check_warm()
        return super().predict(x)

    def _check_warm(self) -> None:
        if not len(self.meta):
            raise ValueError("EcoTTA needs labelled source data before it can adapt: call warm_up(loader) first")

    def warm_up(
        self,
        loader: Iterable[tuple[Any, Tensor]],
        *,
        epochs: int = 10,
        lr: float = 5e-2,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = jitter,
    ) -> float:
        """Trains the parts on pairs of images and labels, and makes that the state to go back to.

        SGD with momentum; the rate rises over the first epoch and falls to a fifth at three places. `augment` (by
        default for pixels in [0, 1]) changes what the network sees. Returns the mean loss of the last epoch.
        """
        if iter(loader) is loader:
            raise ValueError("loader must give its batches anew for each epoch: pass a DataLoader or a list")
        first = next(iter(loader), None)
        if not isinstance(first, (tuple, list)) or len(first) != 2 or not isinstance(first[1], Tensor):
            raise ValueError("warm_up needs labelled source data: a loader of pairs of images and labels")
        with torch.inference_mode(False):
            if not len(self.meta):
                self._build(self._find_shapes(first[0]))
            optimizer = torch.optim.SGD(self.meta.parameters(), lr=lr, momentum=0.9)
            loss = math.nan
            for epoch in range(epochs):
                rate = lr * DROP ** sum(epoch >= share * epochs for share in DROPS)
                losses = self._epoch(loader, optimizer, rate, rising=epoch == 0, augment=augment)
                loss = sum(losses) / len(losses)
        self._start()
        return loss

    def _epoch(
        self, loader: Iterable[Any], optimizer: Optimizer, rate: float, rising: bool, augment: Any
    ) -> list[float]:
        total = len(loader) if isinstance(loader, Sized) else 0
        losses: list[float] = []
        for x, y in loader:
            share = min(1.0, (len(losses) + 1) / total) if rising and total else 1.0
            optimizer.param_groups[0]["lr"] = rate * share
            x = x if augment is None else augment(x, self.generator)
            with torch.enable_grad(), self._adapting():
                loss = F.cross_entropy(logits_of(call(self.model, x)), y)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.zero_grad()
        return losses

    def _find_shapes(self, x: Any) -> list[Shape]:
        shapes: list[Shape] = []

        def measure(k: int, before: Tensor, after: Tensor) -> Tensor:
            self._needs(before.dim() == after.dim() == 4, "is for blocks of feature maps, N x C x H x W")
            stride = -(-before.shape[2] // after.shape[2])
            fits = all(-(-a // stride) == b for a, b in zip(before.shape[2:], after.shape[2:], strict=True))
            self._needs(
                fits,
                f"is for parts whose sides shrink by a whole number; one has {before.shape[2:]} to {after.shape[2:]}",
            )
            shapes.append(Shape(before.shape[1], after.shape[1], stride))
            return after

        with torch.no_grad(), self._adapting(), self._with(measure):
            call(self.model, x)
        return shapes

    def _build(self, shapes: Sequence[Sequence[int]]) -> None:
        self.shapes = [Shape(*shape) for shape in shapes]
        like = next(self.model.parameters())
        parts = (MetaPart(shape, self.generator) for shape in self.shapes)
        self.meta = nn.ModuleList(parts).to(device=like.device, dtype=like.dtype)
        self._start()

    def _start(self) -> None:
        """A fresh optimizer over the parts, and this as the state to go back to."""
        optimizer, lr, scheduler = self._given
        self.trained = {f"meta.{name}": parameter for name, parameter in self.meta.named_parameters()}
        self.optimizer = self._optimizer(optimizer, lr)
        self.scheduler = self._scheduler(scheduler)
        self._remember()

    def _usual_optimizer(self, parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    @contextlib.contextmanager
    def _adapting(self) -> Iterator[None]:
        handles = []
        try:
            for k, (first, last) in enumerate(self._parts):
                handles.append(first.register_forward_pre_hook(self._enter(k)))
                handles.append(last.register_forward_hook(self._leave(k)))
            with adapting(self.model, (), self.statistics, self.prior):
                yield
        finally:
            self._seen.clear()
            for handle in handles:
                handle.remove()

    def _enter(self, k: int) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._seen[k] = args[0]

        return enter

    def _leave(self, k: int) -> Callable[..., Any]:
        return lambda module, args, out: self._at(k, self._seen.pop(k), out)

    def _beside(self, k: int, x: Tensor, out: Tensor) -> Tensor:
        return self.meta[k](x, out)

    @contextlib.contextmanager
    def _with(self, at: Callable[[int, Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Has `at` turn a part's input and output into another output."""
        self._at = at
        try:
            yield
        finally:
            self._at = self._beside

    def _learn(self, x: Any) -> Any:
        distances: list[float] = []

        def match(k: int, before: Tensor, frozen: Tensor) -> Tensor:
            out = self.meta[k](before, frozen)
            loss = self.weight * (out - frozen).abs().mean()
            self._scaled(loss).backward()
            distances.append(float(loss.detach()))
            return out.detach()  # parts learn apart

        with self._with(match):
            call(self.model, x)
        if math.isfinite(sum(distances)):
            self.update()
        self.zero_grad()
        return super()._learn(x)

    def _certain(self, output: Any) -> Tensor | None:
        found = entropies(output)
        chosen = found[found.detach() < self.margin * math.log(logits_of(output).shape[1])]
        self.loss.selected = chosen.numel()
        return chosen.mean() if chosen.numel() else None

    def _own_state(self) -> dict[str, Any]:
        return {"shapes": [tuple(shape) for shape in self.shapes], "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state.get("shapes") or len(self.meta):
            super().load_state_dict(state)
            return
        self._build(state["shapes"])
        super().load_state_dict(state)
        self._remember()  # an adapter without a warm-up of its own goes back to this one

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"].cpu())
