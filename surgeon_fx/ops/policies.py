"""What each family of operations keeps for backward: one policy a family, one row each in `POLICIES`.

A policy is given every tensor that a native operation saves while one layer or function runs, and returns what is kept
in its place. `finish` runs when the forward is done, for what can only be decided then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from surgeon_fx.kernels import compress, decompress, pack_bits, pack_sign
from surgeon_fx.kernels.layout import FLOAT_BITS
from surgeon_fx.ops.saved import Saved, SavedActivation, SavedBits, SavedShape

SMALL_BYTES = 4096  # statistics, masks of a few elements: not worth a record


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Policy:
    """Keeps every tensor exactly, shared by storage."""

    def __init__(self, ratio: float, inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        self.ratio = ratio
        self.inputs = {storage_of(x) for x in inputs}
        self.weights = list(weights)
        self.weight_storages = {storage_of(w) for w in self.weights}
        self.needs_input = True  # else backward reads its shape alone

    def pack(self, x: Tensor) -> Saved:
        return self.keep(x, 0.0)

    def keep(self, x: Tensor, ratio: float) -> Saved:
        saved = SavedActivation(x, ratio)
        saved.lives_anyway = storage_of(x) in self.weight_storages
        return saved

    def finish(self) -> None:
        pass

    def is_weight(self, x: Tensor) -> bool:
        """A parameter, a view of one, or one computed from it (cast, standardised, parametrised): told by its shape."""
        storage = storage_of(x)
        if storage in self.weight_storages:
            return True
        return storage not in self.inputs and any(sorted(x.shape) == sorted(w.shape) for w in self.weights)


class Prune(Policy):
    """Conv, linear, smooth activations, gates: activations pruned by magnitude, weights exact."""

    def pack(self, x: Tensor) -> Saved:
        if not self.needs_input and storage_of(x) in self.inputs:
            return SavedShape(x)
        exact = x.nbytes <= SMALL_BYTES or x.dtype not in FLOAT_BITS or self.is_weight(x)
        return self.keep(x, 0.0 if exact else self.ratio)


class Sign(Policy):
    """ReLU: whether the gradient passes."""

    def pack(self, x: Tensor) -> Saved:
        return SavedBits(x, pack_sign(x), 0, 1) if x.dtype in FLOAT_BITS else super().pack(x)


class Positive(Policy):
    """Leaky ReLU: whether x > 0. NaN takes the slope, as the native kernel has it."""

    def pack(self, x: Tensor) -> Saved:
        return SavedBits(x, pack_bits(x > 0), 0, 1)


def between(low: float, high: float) -> type[Policy]:
    """Hardtanh and its kin: whether x lies strictly inside."""

    class Between(Policy):
        def pack(self, x: Tensor) -> Saved:
            return SavedBits(x, pack_bits(~((x <= low) | (x >= high))), low, (low + high) / 2)

    return Between


class Mask(Policy):
    """Dropout: the mask it multiplies with is zero or one number."""

    def pack(self, x: Tensor) -> Saved:
        if storage_of(x) in self.inputs or x.dtype not in FLOAT_BITS or x.numel() == 0:
            return super().pack(x)
        return SavedBits(x, pack_sign(x), 0, float(x.max()))


class ShapeOnly(Policy):
    """Pools: of the input, backward reads the shape; indices stay."""

    def pack(self, x: Tensor) -> Saved:
        return SavedShape(x) if storage_of(x) in self.inputs else super().pack(x)


class _NormalisedInput(Saved):
    """The input of a normalisation: as it is until the statistics are known, then x-hat pruned and the statistics."""

    __slots__ = ("compressed", "dtype", "mean", "saved", "std", "x")

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x: Tensor | None = x.detach()
        self.saved: Saved | None = None

    def settle(self, mean: Tensor | None, rstd: Tensor | None, ratio: float) -> None:
        x, self.x = self.x, None
        assert x is not None
        if mean is None or rstd is None:
            self.saved = SavedActivation(x, ratio)
            return
        self.mean, self.std, self.dtype = mean, rstd.reciprocal(), x.dtype
        self.compressed = compress(x.sub(mean).mul_(rstd).to(x.dtype), ratio)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        if self.x is not None:
            return (self.x,)
        if self.saved is not None:
            return self.saved.tensors
        return self.compressed.values, self.compressed.bitmask, self.mean, self.std

    def restore(self) -> Tensor:
        if self.x is not None:
            return self.x
        if self.saved is not None:
            return self.saved.restore()
        return decompress(self.compressed).to(self.mean.dtype).mul_(self.std).add_(self.mean).to(self.dtype)


class Normalise(Policy):
    """Batch, layer, group and instance norm: x-hat pruned by magnitude, so that a dropped element means the mean."""

    def __init__(self, ratio: float, inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        super().__init__(ratio, inputs, weights)
        self.pending: list[_NormalisedInput] = []
        self.statistics: list[Tensor] = []  # of the batch: the last two that the operation saves
        self.running: tuple[Tensor, Tensor] | None = None

    def use_running(self, mean: Tensor, variance: Tensor, eps: float, weight: Tensor | None) -> None:
        """Running statistics: the input gradient needs no input, so only a trained weight does."""
        self.needs_input = weight is not None and weight.requires_grad
        if self.needs_input and self.ratio > 0:
            self.running = mean.detach(), (variance.detach() + eps).rsqrt_()

    def pack(self, x: Tensor) -> Saved:
        if storage_of(x) in self.inputs and not self.needs_input:
            return SavedShape(x)
        if storage_of(x) in self.inputs and self.ratio > 0 and x.nbytes > SMALL_BYTES and x.dtype in FLOAT_BITS:
            self.pending.append(_NormalisedInput(x))
            return self.pending[-1]
        if storage_of(x) not in self.weight_storages and x.numel() > 0:
            self.statistics.append(x.detach())
        return super().pack(x)

    def finish(self) -> None:
        for saved in self.pending:
            assert saved.x is not None
            mean, rstd = self._statistics_for(saved.x)
            saved.settle(mean, rstd, self.ratio)

    def _statistics_for(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Mean and inverse deviation, in the shape that broadcasts against x; None where the operation saved none."""
        if self.running is None and len(self.statistics) < 2:
            return None, None
        mean, rstd = self.running or self.statistics[-2:]
        if mean.dim() == 1 and x.dim() >= 2 and mean.numel() == x.shape[1]:  # per channel
            shape = (1, -1, *([1] * (x.dim() - 2)))
            return mean.view(shape), rstd.view(shape)
        if mean.dim() == x.dim():  # per row, already broadcastable
            return mean, rstd
        return None, None


POLICIES: dict[str, Callable[[float, Iterable[Tensor], Iterable[Tensor]], Policy]] = {
    "exact": Policy,
    "prune": Prune,
    "norm": Normalise,
    "sign": Sign,
    "positive": Positive,
    "relu6": between(0.0, 6.0),
    "hardtanh": between(-1.0, 1.0),
    "hardsigmoid": between(-3.0, 3.0),
    "dropout": Mask,
    "pool": ShapeOnly,
}


def run(policy: Policy, call: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Runs `call` natively, with the policy deciding what is kept for backward."""
    with torch.autograd.graph.saved_tensors_hooks(policy.pack, lambda saved: saved.restore()):
        result = call(*args, **kwargs)
    policy.finish()
    return result
