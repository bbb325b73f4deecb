"""Batch norm over the statistics of the batch: the bits of torch's operation, in a third of its time on a CPU.

torch's kernel adds up each channel in order, in doubles, and waits for every addition; `native/batch_norm.c` adds up
eight channels side by side, each in the same order. Its other steps are torch's too. Which of them round once instead
of twice depends on how torch was built, and on the processor: both run on a small tensor once, and where no way of
rounding gives the same bits, torch's operation is what runs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from surgeon_fx.kernels import native
from surgeon_fx.kernels.backends import active_backend, is_plain

SHORTEST_PLANE = 8  # elements of a channel in one sample
ROUNDINGS = range(8)  # sets of enum Fused in batch_norm.c

Found = tuple[Tensor, Tensor, Tensor]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Found:
    """The output, and mean and 1 / deviation by channel; the running statistics move. Not differentiable."""
    arguments = (x, weight, bias, running_mean, running_var, momentum, eps)
    if _is_served(*arguments[:5]) and (rounding := _rounding(native.instruction_set())) is not None:
        return _run(*arguments, rounding)
    return _torch(*arguments)


def _torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Found:
    cudnn = torch.backends.cudnn.enabled
    found = torch._batch_norm_impl_index(x, weight, bias, running_mean, running_var, True, momentum, eps, cudnn)
    return found[0], found[1], found[2]


def _is_served(x: Tensor, *by_channel: Tensor | None) -> bool:
    return (
        is_plain(x)
        and x.dtype is torch.float32
        and x.dim() > 2
        and x.shape[1] > 1  # one channel is also channels-last, which torch adds up in another order
        and x.numel() >= SHORTEST_PLANE * x.shape[0] * x.shape[1] > 0
        and x.is_contiguous()
        and (by_channel[2] is None) is (by_channel[3] is None)
        and active_backend("cpu") == "cpu"
        and all(
            one is None
            or (
                type(one) in (Tensor, Parameter)
                and one.is_cpu
                and one.dtype is x.dtype
                and one.shape == x.shape[1:2]
                and one.is_contiguous()
            )
            for one in by_channel
        )
    )


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    rounding: int,
) -> Found:
    batch, channels = x.shape[:2]
    y, mean, rstd = torch.empty_like(x), x.new_empty(channels), x.new_empty(channels)
    by_channel = [None if one is None else one.data_ptr() for one in (weight, bias, running_mean, running_var)]
    made = (one.data_ptr() for one in (mean, rstd, y))
    sizes = (batch, channels, x.numel() // batch // channels)
    native.library().sfx_batch_norm(x.data_ptr(), *sizes, *by_channel, momentum, eps, rounding, *made, native.threads())
    return y, mean, rstd


@cache
def _rounding(_: str) -> int | None:
    """With which roundings an instruction set gives torch's bits; None where none does."""
    source = torch.Generator("cpu").manual_seed(0)
    x = torch.empty(4, 19, 41, 37, dtype=torch.float32, device="cpu").normal_(1, 3, generator=source)
    weight, bias, mean, var = x.new_empty(4, 19).uniform_(generator=source).unbind()
    for rounding in ROUNDINGS:
        ours, theirs = [mean.clone(), var.clone()], [mean.clone(), var.clone()]
        ours += _run(x, weight, bias, ours[0], ours[1], 1 / 3, 1e-5, rounding)
        theirs += _torch(x, weight, bias, theirs[0], theirs[1], 1 / 3, 1e-5)
        if all(map(torch.equal, ours, theirs)):
            return rounding
    return None
