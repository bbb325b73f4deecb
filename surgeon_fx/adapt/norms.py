"""Batch norms with statistics of their own, that stand in for a model's while a method runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class MovingNorm(nn.Module):
    """A batch norm over the same weight and bias that normalises with statistics of its own.

    They start as the source's (or as those of the first batch, where there are none), and follow the batches only
    while `moving`. A timm norm's dropout and activation come behind it.
    """

    mean: Tensor
    var: Tensor
    moving = False

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.behind = _behind(norm)  # a tuple: the modules stay the norm's
        known = norm.running_mean is not None and norm.running_var is not None
        self.register_buffer("mean", norm.running_mean.clone() if known else torch.empty(0))  # type: ignore[union-attr]
        self.register_buffer("var", norm.running_var.clone() if known else torch.empty(0))  # type: ignore[union-attr]

    def _batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per channel, in the precision of the statistics."""
        x = x.to(self.mean.dtype) if self.mean.numel() else x
        var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
        if not self.mean.numel():
            self.mean, self.var = mean.detach(), var.detach()
        return mean, var

    def _normalise(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        shape = [1, -1, *[1] * (x.dim() - 2)]
        out = (x - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self._norm(x)
        for module in self.behind:
            out = module(out)
        return out

    def _norm(self, x: Tensor) -> Tensor:
        if not self.mean.numel():
            self._batch(x)
        return self._normalise(x, self.mean, self.var)


def _behind(norm: _BatchNorm) -> tuple[nn.Module, ...]:
    """What a norm does after normalising."""
    if type(norm).forward in PLAIN:
        return ()
    found = tuple(getattr(norm, name, None) for name in ("drop", "act"))
    if not all(isinstance(module, nn.Module) for module in found):
        raise ValueError(f"{type(norm).__name__} has a forward of its own, and no other norm can stand in for it")
    return found  # type: ignore[return-value]


class RobustNorm(MovingNorm):
    """RoTTA's: statistics move by `momentum` of each batch, and normalise it as moved, gradient included."""

    def __init__(self, norm: _BatchNorm, momentum: float = 0.05) -> None:
        super().__init__(norm)
        self.momentum = momentum

    def _norm(self, x: Tensor) -> Tensor:
        if not self.moving:
            return super()._norm(x)
        mean, var = self._batch(x)
        mean, var = torch.lerp(self.mean, mean, self.momentum), torch.lerp(self.var, var, self.momentum)
        self.mean, self.var = mean.detach(), var.detach()
        return self._normalise(x, mean, var)


class MectaNorm(MovingNorm):
    """MECTA's: statistics move by as much as a batch differs from them, and backward keeps few channels.

    The symmetric divergence of the Gaussians of batch and past, averaged over channels, is d; the statistics move by
    beta = 1 - exp(-d). Backward keeps 1 - `ratio` of the channels, chosen at random; where beta is not above
    `threshold` the layer is frozen: it keeps nothing, and passes the gradient on as a norm with fixed statistics does
    (the published code passes it on unscaled).
    """

    SOFTENED = 1e-3  # added to variances in the divergence

    def __init__(self, norm: _BatchNorm, ratio: float, threshold: float, generator: torch.Generator) -> None:
        super().__init__(norm)
        self.ratio, self.threshold = ratio, threshold
        self.__dict__["generator"] = generator
        self.frozen, self.cache_bytes = False, 0

    def _norm(self, x: Tensor) -> Tensor:
        if not self.moving:
            return super()._norm(x)
        with torch.no_grad():
            mean, var = self._batch(x)
            beta = self._beta(mean, var)
            self.mean, self.var = torch.lerp(self.mean, mean, beta), torch.lerp(self.var, var, beta)
        self.frozen = bool(beta <= self.threshold)
        channels = x.shape[1]
        kept = (
            torch.randperm(channels, generator=self.__dict__["generator"])[int(self.ratio * channels) :].sort().values
        )
        self.cache_bytes = 0 if self.frozen else len(kept) * (x.numel() // channels) * x.element_size()
        return _Mecta.apply(x, self, mean, var, None if self.frozen else kept.to(x.device), self.weight, self.bias)

    def _beta(self, mean: Tensor, var: Tensor) -> Tensor:
        apart = (mean - self.mean).square()
        a, b = var + self.SOFTENED, self.var + self.SOFTENED
        divergence = ((a + apart) / b + (b + apart) / a) / 2 - 1
        return 1 - torch.exp(-divergence.mean())


class _Mecta(torch.autograd.Function):
    """Normalises with the statistics of a `MectaNorm`; backward as of a norm by batch statistics, on kept channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: MectaNorm, mean: Tensor, var: Tensor, kept: Any, weight: Any, bias: Any
    ) -> Tensor:
        ctx.save_for_backward(None if kept is None else x[:, kept], mean, var, norm.mean, norm.var, kept, weight)
        ctx.eps, ctx.has_bias = norm.eps, bias is not None
        return norm._normalise(x, norm.mean, norm.var)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        part, mean, var, moved_mean, moved_var, kept, weight = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        shape, dims = [1, -1, *[1] * (grad.dim() - 2)], [d for d in range(grad.dim()) if d != 1]
        slope = (moved_var + ctx.eps).rsqrt()
        scale = (slope if weight is None else slope * weight).view(shape)
        if kept is None:
            return grad * scale, None, None, None, None, None, None
        inner = grad - grad.mean(dims, keepdim=True)
        on_kept = grad[:, kept]
        normalised = (part - mean[kept].view(shape)) * (var[kept] + ctx.eps).rsqrt().view(shape)
        inner[:, kept] -= normalised * (on_kept * normalised).mean(dims, keepdim=True)
        weight_grad = None
        if weight is not None:
            weight_grad = torch.zeros_like(weight)
            centred = (part - moved_mean[kept].view(shape)) * slope[kept].view(shape)
            weight_grad[kept] = (on_kept * centred).sum(dims)
        return inner * scale, None, None, None, None, weight_grad, grad.sum(dims) if ctx.has_bias else None


@contextlib.contextmanager
def swapped(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Puts other modules into a model wherever it has these, and the model's own back."""
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and child in others
    ]
    try:
        for parent, key, child in places:
            parent._modules[key] = others[child]
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


@contextlib.contextmanager
def moving(norms: Mapping[nn.Module, MovingNorm]) -> Iterator[None]:
    """Statistics follow the batches, except one that leaves them other than finite."""
    before = statistics_of(norms)
    try:
        for norm in norms.values():
            norm.moving = True
        yield
    finally:
        for norm in norms.values():
            norm.moving = False
        if not all(bool(torch.isfinite(x).all()) for pair in statistics_of(norms) for x in pair):
            load_statistics(norms, before)


def statistics_of(norms: Mapping[nn.Module, MovingNorm]) -> list[tuple[Tensor, Tensor]]:
    return [(norm.mean, norm.var) for norm in norms.values()]


def load_statistics(norms: Mapping[nn.Module, MovingNorm], state: list[tuple[Tensor, Tensor]]) -> None:
    for norm, (mean, var) in zip(norms.values(), state, strict=True):
        norm.mean, norm.var = mean.clone(), var.clone()
