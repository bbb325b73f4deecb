"""The state a model adapts in: evaluation mode, but batch norms see the batch; everything as before afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextlib.contextmanager
def adapting(
    model: nn.Module, trained: Collection[nn.Parameter], statistics: bool = True, prior: float = 0.0
) -> Iterator[None]:
    """Sets modes and gradient flags for one step, and sets them back.

    Dropout and the like rest. Batch norms normalise with the batch's statistics, and with a `prior` with a mixture in
    which the source's count as much as `prior` samples, as constants: no gradient goes through it. Their running
    statistics stay what they are: the step works on copies.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    norms = batch_norms(model) if statistics else []
    buffers = [(norm, {name: norm._buffers.get(name) for name in BUFFERS}) for norm in norms]
    wanted = {id(parameter) for parameter in trained}
    handles = []
    try:
        for module, _ in modes:
            module.training = False
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in wanted)
        for norm, own in buffers:
            norm._buffers.update({name: None if value is None else value.clone() for name, value in own.items()})
            use = (
                _mix(own["running_mean"], own["running_var"], prior)
                if prior and own["running_mean"] is not None
                else _see
            )
            handles.append(norm.register_forward_pre_hook(use, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm, own in buffers:
            norm._buffers.update(own)
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _see(norm: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """The batch's own statistics; the source's where there is one value a channel and nothing to take them of."""
    x = args[0] if args else named["input"]
    norm.training = x.numel() > x.shape[1] or norm._buffers["running_mean"] is None


def _mix(mean: Tensor | None, variance: Tensor | None, prior: float) -> Callable[..., None]:
    assert mean is not None
    assert variance is not None

    @torch.no_grad()
    def mix(norm: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = args[0] if args else named["input"]
        share = x.shape[0] / (x.shape[0] + prior)
        dims = [d for d in range(x.dim()) if d != 1]
        found_variance, found = torch.var_mean(x.to(mean.dtype), dims, correction=0)
        norm._buffers["running_mean"] = torch.lerp(mean, found, share)
        norm._buffers["running_var"] = torch.lerp(variance, found_variance, share)

    return mix
