"""What each family of operations keeps for backward: one policy a family, one row each in `POLICIES`.

A policy is given every tensor that a native operation saves while one layer or function runs, and returns what is kept
in its place. `finish` runs when the forward is done, for what can only be decided then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from surgeon_fx.kernels import compress, decompress, pack_bits, pack_sign
from surgeon_fx.kernels.layout import FLOAT_BITS
from surgeon_fx.ops.saved import (
    Saved,
    SavedActivation,
    SavedBits,
    SavedIndices,
    SavedShape,
    Window,
    detached,
    memory_key,
    refuse_double_backward,
)

SMALL_BYTES = 4096  # statistics, masks of a few elements: not worth a record


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


class Policy:
    """Keeps every tensor exactly, shared by storage."""

    handles = True  # knows the operation: what it keeps is what the operation needs
    owner: str | None = None  # the layer whose ratio it follows

    def __init__(self, ratio: float, inputs: Iterable[Tensor] = (), weights: Iterable[Tensor] = ()) -> None:
        self.ratio = ratio
        self.inputs = {storage_of(x) for x in inputs}
        self.weights = list(weights)
        self.weight_storages = {storage_of(w) for w in self.weights}
        self.needs_input = True  # else backward reads its shape alone

    def pack(self, x: Tensor) -> Saved:
        return self.keep(x, 0.0)

    def keep(self, x: Tensor, ratio: float) -> Saved:
        """Pruned, or exactly if it is small. A small view of something large is copied, so that the large can go."""
        small = x.nbytes <= SMALL_BYTES
        if small and x.untyped_storage().nbytes() > 2 * SMALL_BYTES:
            x = x.clone()
        return SavedActivation(x, 0.0 if small or x.dtype not in FLOAT_BITS else ratio)

    def finish(self) -> None:
        pass

    def is_weight(self, x: Tensor) -> bool:
        """A parameter, a view of one, or one computed from it (cast, standardised, parametrised): told by its shape."""
        storage = storage_of(x)
        if storage in self.weight_storages:
            return True
        return storage not in self.inputs and any(sorted(x.shape) == sorted(w.shape) for w in self.weights)


class Unknown(Policy):
    """What runs outside any policy of ours: kept exactly, so that sharing is seen and bytes are counted."""

    handles = False


class AsEager(Unknown):
    """What eager keeps, to the byte: a small view holds all it is a view of."""

    def pack(self, x: Tensor) -> Saved:
        return SavedActivation(x, 0.0)


class Prune(Policy):
    """Conv, linear, smooth activations, gates: activations pruned by magnitude, weights exact."""

    def pack(self, x: Tensor) -> Saved:
        if not self.needs_input and storage_of(x) in self.inputs:
            return SavedShape(x)
        return self.keep(x, 0.0 if self.is_weight(x) else self.ratio)


class PruneInputs(Policy):
    """Where only what goes in is known to be safe to prune: attention modules, whose q, k, v and output stay exact.

    Of torch's `nn.MultiheadAttention` the input of the last projection is told by its shape: rows of the embedding.
    """

    def pack(self, x: Tensor) -> Saved:
        inside = storage_of(x) in self.inputs or (x.dim() == 2 and any(x.shape[-1:] == w.shape for w in self.weights))
        return self.keep(x, self.ratio if inside and not self.is_weight(x) else 0.0)


class Sign(Policy):
    """ReLU: whether the gradient passes."""

    def pack(self, x: Tensor) -> Saved:
        return SavedBits(x, pack_sign(x), _one(x)) if x.dtype in FLOAT_BITS else super().pack(x)


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=like.dtype, device=like.device)


class Positive(Policy):
    """Leaky ReLU: whether x > 0. NaN takes the slope, as the native kernel has it."""

    def pack(self, x: Tensor) -> Saved:
        return SavedBits(x, pack_bits(x > 0), _one(x))


def between(low: float, high: float, at: tuple[bool, bool, bool] = (False, False, True)) -> type[Policy]:
    """Hardtanh, clamp and their kin: whether the gradient passes. `at` says whether it does at low, high and NaN."""
    at_low, at_high, at_nan = at

    class Between(Policy):
        def pack(self, x: Tensor) -> Saved:
            if x.dtype not in FLOAT_BITS:
                return super().pack(x)
            stops = (x < low if at_low else x <= low) | (x > high if at_high else x >= high)
            passes = ~stops if at_nan else ~(stops | x.isnan())
            # Zero is one of the two values restored, so the bits mark the side it is not on.
            if low < 0 < high or (low == 0 and at_low) or (high == 0 and at_high):
                return SavedBits(x, pack_bits(~passes), _one(x) * (-math.inf if math.isinf(high) else math.inf))
            inside = math.inf if math.isinf(high) else -math.inf if math.isinf(low) else (low + high) / 2
            return SavedBits(x, pack_bits(passes), _one(x) * inside)

    return Between


class Mask(Policy):
    """Dropout: the mask it multiplies with is zero or one number."""

    def pack(self, x: Tensor) -> Saved:
        if x.dtype is torch.bool:
            return SavedBits(x, pack_bits(x), _one(x))
        if storage_of(x) in self.inputs or x.dtype not in FLOAT_BITS or x.numel() == 0:
            return super().pack(x)
        return SavedBits(x, pack_sign(x), x.max())


class Pool(Policy):
    """Pools: of the input, backward reads the shape; of the indices, the place in the window."""

    plane: Sequence[int] = ()
    window: Window | None = None  # unknown where windows differ in size

    def pack(self, x: Tensor) -> Saved:
        if storage_of(x) in self.inputs:
            return SavedShape(x)
        if x.dtype is torch.int64 and self.plane:
            return SavedIndices(x, self.plane, self.window)
        return super().pack(x)


class _NormalisedInput(Saved):
    """The input of a normalisation: as it is until the statistics are known, then x-hat pruned.

    Backward is given x-hat over `rstd` and a mean of zero; or, where the saved weight takes rstd over, x-hat itself.
    """

    __slots__ = ("compressed", "key", "rstd", "saved", "x")

    def __init__(self, x: Tensor) -> None:
        self.key = memory_key(x)
        self.x: Tensor | None = detached(x)
        self.saved: Saved | None = None
        self.rstd: Tensor | None = None

    def settle(self, hat: Tensor, ratio: float, rstd: Tensor | None) -> None:
        self.x, self.compressed, self.rstd = None, compress(hat, ratio), rstd

    def settle_as_it_is(self, ratio: float) -> None:
        x, self.x = self.x, None
        assert x is not None
        self.saved = SavedActivation(x, ratio)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        if self.x is not None:
            return (self.x,)
        if self.saved is not None:
            return self.saved.tensors
        kept = (self.compressed.values, self.compressed.bitmask)
        return kept if self.rstd is None else (*kept, self.rstd)

    def restore(self) -> Tensor:
        if self.x is not None:
            return self.x
        if self.saved is not None:
            return self.saved.restore()
        refuse_double_backward()
        hat = decompress(self.compressed)
        return hat if self.rstd is None else hat.div_(self.rstd)


class _Replaced(Saved):
    """A statistic or weight of a normalisation. Once x-hat stands for the input, backward is given `value` of it."""

    __slots__ = ("saved", "value")

    def __init__(self, x: Tensor) -> None:
        self.saved = SavedActivation(x, 0.0)
        self.value: Callable[[Tensor], Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.saved.tensors

    def restore(self) -> Tensor:
        found = self.saved.restore()
        return found if self.value is None else self.value(found)


class Normalise(Policy):
    """Batch, layer, group and instance norm: x-hat pruned by magnitude, so that a dropped element means the mean.

    The native backward computes x-hat from what it is given. It is given x-hat scaled back, and a mean of zero. For
    batch norm with a weight not even the scaling is needed: deviation one and the weight times rstd give the same
    three gradients.
    """

    def __init__(self, ratio: float, inputs: Iterable[Tensor] = (), weights: Iterable[Tensor] = ()) -> None:
        super().__init__(ratio, inputs, weights)
        self.pending: list[_NormalisedInput] = []
        self.others: list[tuple[Tensor, _Replaced]] = []
        self.running: tuple[Tensor, Tensor, float] | None = None
        self.weight: Tensor | None = None  # of a batch norm

    def use_running(self, mean: Tensor, variance: Tensor, eps: float) -> None:
        """Running statistics: the input gradient needs no input, so only a trained weight does."""
        self.needs_input = self.weight is not None and self.weight.requires_grad
        self.running = mean.detach(), variance.detach(), eps

    def pack(self, x: Tensor) -> Saved:
        if storage_of(x) in self.inputs:
            if not self.needs_input:
                return SavedShape(x)
            if self.ratio > 0 and x.nbytes > SMALL_BYTES and x.dtype in FLOAT_BITS:
                self.pending.append(_NormalisedInput(x))
                return self.pending[-1]
        if self.ratio == 0 or x.numel() == 0:
            return super().pack(x)
        self.others.append((detached(x), _Replaced(x)))
        return self.others[-1][1]

    def finish(self) -> None:
        if len(self.pending) == 1 and (found := self._statistics()):
            mean, rstd, folds = found
            x = self.pending[0].x
            assert x is not None
            if folds and x.dtype == mean.dtype:  # the native kernel does it in one pass
                hat = torch.batch_norm(x, None, None, mean.view(-1), rstd.view(-1) ** -2, False, 0.0, 0.0, False)
            else:
                hat = x.sub(mean).mul_(rstd).to(x.dtype)
            self.pending[0].settle(hat, self.ratio, None if folds else rstd)
        else:
            for saved in self.pending:
                saved.settle_as_it_is(self.ratio)

    def _statistics(self) -> tuple[Tensor, Tensor, bool] | None:
        """Mean and inverse deviation, broadcast against x, and whether the weight takes the deviation over.

        None where they cannot be told. Tells the saved ones what to restore as.
        """
        x = self.pending[0].x
        assert x is not None
        if self.running is not None:
            mean, variance, eps = self.running
            rstd = (variance + eps).rsqrt_()
            self._replace(mean, torch.zeros_like)
            self._replace(variance, lambda v: torch.full_like(v, 1 - eps))
            assert self.weight is not None
            self._replace(self.weight, lambda w: w * (variance + eps).rsqrt_().to(w.dtype))
            return _per_channel(mean, x), _per_channel(rstd, x), True
        found = [(s, r) for s, r in self.others if storage_of(s) not in self.weight_storages]
        pairs = [(a, b) for a, b in pairwise(found) if a[0].shape == b[0].shape]
        if not pairs:
            return None
        (mean, mean_saved), (rstd, rstd_saved) = pairs[-1]
        per_channel = mean.dim() == 1 and x.dim() >= 2 and mean.numel() == x.shape[1]
        mean_saved.value = torch.zeros_like
        if per_channel and self.weight is not None and self._replace(self.weight, lambda w: w * rstd.to(w.dtype)):
            rstd_saved.value = torch.ones_like
            return _per_channel(mean, x), _per_channel(rstd, x), True
        if per_channel:
            mean, rstd_view = _per_channel(mean, x), _per_channel(rstd, x)
        elif mean.dim() == x.dim():  # per row
            rstd_view = rstd
        elif mean.dim() == 2 and x.dim() >= 2 and mean.shape[0] == x.shape[0] and x.shape[1] % mean.shape[1] == 0:
            width = x.shape[1] // mean.shape[1]  # per group of channels
            ones = [1] * (x.dim() - 2)
            mean = mean.repeat_interleave(width, 1).view(*x.shape[:2], *ones)
            rstd_view = rstd.repeat_interleave(width, 1).view(*x.shape[:2], *ones)
        else:
            mean_saved.value = None
            return None
        return mean, rstd_view, False

    def _replace(self, x: Tensor, value: Callable[[Tensor], Tensor]) -> bool:
        found = [saved for tensor, saved in self.others if storage_of(tensor) == storage_of(x)]
        for saved in found:
            saved.value = value
        return bool(found)


def _per_channel(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *([1] * (x.dim() - 2)))


POLICIES: dict[str, type[Policy]] = {
    "exact": Policy,
    "unknown": Unknown,
    "prune": Prune,
    "attention": PruneInputs,
    "inputs": PruneInputs,
    "norm": Normalise,
    "sign": Sign,
    "positive": Positive,
    "relu6": between(0.0, 6.0),
    "hardtanh": between(-1.0, 1.0),
    "hardsigmoid": between(-3.0, 3.0),
    "dropout": Mask,
    "pool": Pool,
}
