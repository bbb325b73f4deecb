"""A linear layer whose weight is not trained, under autocast: the weight itself is kept, not autocast's copy of it.

Reference: the native function's gradients. Without autocast the native function keeps the weight itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import cast


class FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.shape = dtype, x.shape
        ctx.save_for_backward(weight)
        return F.linear(cast(x, dtype), cast(weight, dtype), cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        rows = grads[0].reshape(-1, weight.shape[0])
        return (
            rows.mm(cast(weight, ctx.dtype)).view(ctx.shape) if wants_x else None,
            None,
            rows.sum(0) if wants_bias else None,
            None,
        )
