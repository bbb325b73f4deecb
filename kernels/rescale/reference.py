"""The oracle, and what runs where there is no C library: the place of each value, its channel, a product and a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon_fx.kernels.bits import unpack_bits


def rescale(
    values: Tensor, bitmask: Tensor, numel: int, run: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    if bitmask.numel():
        places = unpack_bits(bitmask, numel).nonzero().view(-1)
    else:
        places = torch.arange(values.numel(), device=values.device)
    given = weight if weight is not None else bias
    channel = places.div_(run, rounding_mode="floor").remainder_(1 if given is None else given.numel())
    out = values if weight is None else values * weight[channel]
    out = out if bias is None else out + bias[channel]
    return out.to(values.dtype)
