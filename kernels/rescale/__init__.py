"""A scale and a shift by channel for the kept elements of a pruned tensor: what a norm made of its normalised input.

Element i, in memory order, belongs to channel `i // run % channels`. Values and bitmask are those of `compress`: where
everything is kept there is no mask. The bitmask of the result is that of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend, define_op
from surgeon_fx.kernels.compress import check_parts
from surgeon_fx.kernels.compress.reference import mask_mismatch
from surgeon_fx.kernels.native import call, threads
from surgeon_fx.kernels.rescale import reference


def rescale(
    values: Tensor,
    bitmask: Tensor,
    numel: int,
    run: int,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """values * weight[channel] + bias[channel]; weight and bias have one element for each channel."""
    return _rescale_op(values, bitmask, numel, run, weight, bias)


def _run_rescale(
    values: Tensor, bitmask: Tensor, numel: int, run: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    check_parts(values, bitmask, numel)
    given = [x.detach().reshape(-1).contiguous() for x in (weight, bias) if x is not None]
    if not given:
        return values.clone()
    channels = given[0].numel()
    if run < 1 or any(x.numel() != channels for x in given) or numel % (run * channels):
        raise ValueError(f"{numel} elements do not come in runs of {run} for each of {channels} channels")
    w, b = (None if x is None else x.detach().reshape(-1).contiguous() for x in (weight, bias))
    served = values.dtype is torch.float32 and all(x.dtype is torch.float32 for x in given)
    if not served or active_backend(values.device.type) != "cpu":
        return reference.rescale(values, bitmask, numel, run, w, b)
    out = torch.empty_like(values)
    if call(
        "sfx_rescale",
        values.data_ptr(),
        values.numel(),
        bitmask.data_ptr() if bitmask.numel() else None,
        numel if values.numel() else 0,  # where nothing is kept there is no mask either
        run,
        channels,
        None if w is None else w.data_ptr(),
        None if b is None else b.data_ptr(),
        out.data_ptr(),
        threads(),
    ):
        raise ValueError(mask_mismatch(values.numel()))
    return out


def _fake_rescale(
    values: Tensor, bitmask: Tensor, numel: int, run: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    return torch.empty_like(values)


_rescale_op = define_op(
    "rescale(Tensor values, Tensor bitmask, SymInt numel, SymInt run, Tensor? weight, Tensor? bias) -> Tensor",
    _run_rescale,
    _fake_rescale,
)
