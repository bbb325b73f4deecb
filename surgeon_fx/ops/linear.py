"""Matrix products with a parameter: linear layers, and layers written out as `matmul`, `addmm` or `einsum`.

Reference: the native product's gradients, with the activation replaced by its pruned self where the gradient of the
parameter reads it. The gradient of the activation reads the parameter, so it is exact. Products of two activations
(attention) and vectors are left to the native function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.kernels.backends import active_backend
from surgeon_fx.kernels.layout import is_row_major
from surgeon_fx.kernels.sparse_grad import linear_weight_grad, linear_weight_grad_pays
from surgeon_fx.ops.common import (
    autocast_dtype,
    cast,
    is_parameter,
    needs_graph,
    reduce_to,
    remember_exact,
    run_exactly,
)
from surgeon_fx.ops.frozen import FrozenLinear
from surgeon_fx.ops.keep import Kept, can_prune, restored, save, without_surroundings
from surgeon_fx.ops.rounded import run_rounded, run_unknown
from surgeon_fx.ops.slots import Slot, find_slot, mark


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtype, given = autocast_dtype(x), x
        x = cast(x, ctx.dtype)
        save(ctx, [Kept(slot, x, ratio, cast_of=given)], weight)
        return F.linear(x, cast(weight, ctx.dtype), cast(bias, ctx.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grads[0].reshape(-1, weight.shape[0])
        return (
            None,
            None,
            rows.mm(cast(weight, ctx.dtype)).view(ctx.kept[0].shape) if wants_x else None,
            _weight_grad(ctx.kept[0], saved, rows) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )


def _weight_grad(kept: Kept, saved: Sequence[Any], rows: Tensor) -> Tensor:
    """rows^T x, from what was kept of x where that can be."""
    inputs = kept.shape[-1]
    if linear_weight_grad_pays(saved[0].numel(), rows, inputs) and is_row_major(kept.shape, kept.restored_stride):
        found = kept.packed(*saved)
        if found is not None:
            return linear_weight_grad(rows, *found, inputs, active_backend(rows.device.type))
    return rows.t().mm(kept.restore(*saved).reshape(-1, inputs))


def linear(key: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not needs_graph(input, weight, bias) or not weight.requires_grad or weight.dim() != 2:
        dtype = autocast_dtype(input)
        frozen = dtype is not None and is_parameter(weight) and weight.dim() == 2 and input.dim() > 0
        if frozen and needs_graph(input, bias) and weight.dtype is torch.float32:
            return FrozenLinear.apply(input, weight, bias, dtype)
        return F.linear(input, weight, bias)
    slot = find_slot(key, input)
    slot.elements += input.numel()
    input, ratio = without_surroundings(input), slot.ratio
    if not can_prune(input, ratio):
        return run_exactly(slot, F.linear, [input], input, weight, bias)
    return mark(Linear.apply(slot, ratio, input, weight, bias), slot)


class Product(torch.autograd.Function):
    """`a @ b` for matrices and batches of them; `pruned` says which of the two is the activation."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, a: Tensor, b: Tensor, pruned: int) -> Tensor:
        ctx.dtype, ctx.pruned = autocast_dtype(a), pruned
        operands = [cast(a, ctx.dtype), cast(b, ctx.dtype)]
        save(ctx, [Kept(slot, operands[pruned], ratio)], (a, b)[1 - pruned])
        return torch.matmul(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, weight = ctx.saved_tensors
        weight = cast(weight, ctx.dtype)
        _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        if ctx.pruned == 0 and weight.dim() == 2:  # a layer written out
            da = grads[0].matmul(weight.t()) if wants_a else None
            rows = grads[0].reshape(-1, weight.shape[1])
            return None, None, da, _weight_grad(ctx.kept[0], saved, rows).t() if wants_b else None, None
        activation = ctx.kept[0].restore(*saved)
        a, b = (activation, weight) if ctx.pruned == 0 else (weight, activation)
        return (
            None,
            None,
            reduce_to(grads[0].matmul(b.mT), a.shape) if wants_a else None,
            _left_gradient(a, grads[0], b) if wants_b else None,
            None,
        )


def _left_gradient(a: Tensor, grad: Tensor, b: Tensor) -> Tensor:
    """The gradient of b in a @ b; where b is one matrix, all rows of a are one product."""
    if b.dim() == 2:
        return a.reshape(-1, a.shape[-1]).t().mm(grad.reshape(-1, grad.shape[-1]))
    return reduce_to(a.mT.matmul(grad), b.shape)


def _multiply(key: str, native: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    parameters = [is_parameter(a), is_parameter(b)]
    if not needs_graph(a, b) or sum(parameters) == 2 or min(a.dim(), b.dim()) < 2:
        return native(a, b)
    if not any(parameters):  # attention written out: both stay as they are, or are rounded
        slot = find_slot(key, a)
        if slot.group.exact_saves is not None:
            return run_rounded(slot, "matmul", native, a, b)
        output = native(a, b)
        kept = [x for x, other in ((a, b), (b, a)) if other.requires_grad]
        remember_exact(slot, output.grad_fn, kept)
        return output
    pruned = parameters.index(False)
    activation, weight = ((a, b), (b, a))[pruned]
    if not weight.requires_grad:
        return native(a, b)
    slot = find_slot(key, activation)
    slot.elements += activation.numel()
    if not can_prune(activation, slot.ratio):
        return run_exactly(slot, native, [activation], a, b)
    return mark(Product.apply(slot, slot.ratio, a, b, pruned), slot)


def matmul(key: str, input: Tensor, other: Tensor) -> Tensor:
    return _multiply(key, torch.matmul, input, other)


def mm(key: str, input: Tensor, mat2: Tensor) -> Tensor:
    return _multiply(key, torch.mm, input, mat2)


def bmm(key: str, input: Tensor, mat2: Tensor) -> Tensor:
    return _multiply(key, torch.bmm, input, mat2)


class AffineProduct(torch.autograd.Function):
    """`bias + x @ weight`, as Hugging Face's Conv1D has it."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtype, ctx.bias_shape = autocast_dtype(x), bias.shape
        x = cast(x, ctx.dtype)
        save(ctx, [Kept(slot, x, ratio)], weight)
        return torch.addmm(cast(bias, ctx.dtype), x, cast(weight, ctx.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, weight = ctx.saved_tensors
        _, _, wants_bias, wants_x, wants_weight = ctx.needs_input_grad
        return (
            None,
            None,
            reduce_to(grads[0], ctx.bias_shape) if wants_bias else None,
            grads[0].mm(cast(weight, ctx.dtype).t()) if wants_x else None,
            _weight_grad(ctx.kept[0], saved, grads[0]).t() if wants_weight else None,
        )


def addmm(key: str, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    layer = is_parameter(mat2) and mat2.requires_grad and not is_parameter(mat1) and beta == 1 and alpha == 1
    if not needs_graph(input, mat1, mat2) or not layer:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    slot = find_slot(key, mat1)
    slot.elements += mat1.numel()
    if not can_prune(mat1, slot.ratio):
        return run_exactly(slot, torch.addmm, [mat1], input, mat1, mat2)
    return mark(AffineProduct.apply(slot, slot.ratio, input, mat1, mat2), slot)


class Contraction(torch.autograd.Function):
    """`einsum` of an activation and a parameter. Its gradients are those of the same contraction, run once more."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, ratio: float, equation: str, pruned: int, *operands: Tensor) -> Tensor:
        ctx.equation, ctx.pruned = equation, pruned
        ctx.dtype = autocast_dtype(operands[pruned])
        operands = tuple(cast(x, ctx.dtype) for x in operands)
        save(ctx, [Kept(slot, operands[pruned], ratio)], operands[1 - pruned])
        return torch.einsum(equation, *operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (activation,), (weight,) = restored(ctx)
        operands = [activation, weight] if ctx.pruned == 0 else [weight, activation]
        wanted = ctx.needs_input_grad[4:]
        operands = [x.detach().requires_grad_(wants) for x, wants in zip(operands, wanted, strict=True)]
        with torch.enable_grad():
            again = torch.einsum(ctx.equation, *operands)
        found = iter(torch.autograd.grad(again, [x for x in operands if x.requires_grad], grads[0]))
        return None, None, None, None, *(next(found) if wants else None for wants in wanted)


def einsum(key: str, equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    tensors = isinstance(equation, str) and len(operands) == 2 and all(isinstance(x, Tensor) for x in operands)
    parameters = [is_parameter(x) for x in operands]
    if not tensors or not needs_graph(*operands) or sum(parameters) != 1:
        return run_unknown(key, torch.einsum, equation, *operands)
    pruned = parameters.index(False)
    if not operands[1 - pruned].requires_grad:
        return torch.einsum(equation, *operands)
    slot = find_slot(key, operands[pruned])
    slot.elements += operands[pruned].numel()
    if not can_prune(operands[pruned], slot.ratio):
        return run_exactly(slot, torch.einsum, [operands[pruned]], equation, *operands)
    return mark(Contraction.apply(slot, slot.ratio, equation, pruned, *operands), slot)
