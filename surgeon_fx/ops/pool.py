"""Pools: of the input, backward reads the shape; of the indices of a maximum, the place in the window. Exact.

A max pool that is all that reads a ReLU's output takes the ReLU in (`passes/fuse_pools.py`): where a maximum is not
positive its gradient stops, and what is not a maximum has none, so that the ReLU's own bits are not needed.

Reference: the native gradient, given indices restored from the narrow ones and a tensor of the input's shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops.common import each, needs_graph
from surgeon_fx.ops.relu import relu
from surgeon_fx.ops.slots import Slot, find_slot, mark, note

aten = torch.ops.aten


class Window:
    """The windows of a max pool: turns an index into the input plane into a place in the window, and back.

    What is left of an index after the corner of its window is one of few numbers, the same for every window. Half a
    byte says which, or a byte where there are many; one number more says that no gradient passes.
    """

    def __init__(
        self,
        plane: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.plane, self.stride, self.padding = plane, stride, padding
        self.pitch = [math.prod(plane[d + 1 :]) for d in range(len(plane))]
        places = [[step * dilation[d] * self.pitch[d] for step in range(kernel[d])] for d in range(len(plane))]
        self.places = sorted({sum(place) for place in itertools.product(*places)})
        self.stops = math.prod(kernel)  # the number of a maximum that hands no gradient on

    def fits(self) -> bool:
        return self.stops < 256

    def bytes(self, numel: int) -> int:
        """Of the places of so many outputs."""
        return (numel + 1) // 2 if self.stops < 16 else numel

    def _corners(self, like: Tensor) -> Tensor:
        """The index of each window's first place, which may lie in the padding; broadcast against the output."""
        dims = len(self.plane)
        corners = torch.zeros([1] * dims, dtype=torch.long, device=like.device)
        for d in range(dims):
            begin = torch.arange(like.shape[d - dims], device=like.device) * self.stride[d] - self.padding[d]
            corners = corners + (begin * self.pitch[d]).view([-1 if i == d else 1 for i in range(dims)])
        return corners

    def narrow(self, indices: Tensor, passes: Tensor | None = None) -> Tensor:
        """The places as a vector; the gradient goes through those that `passes` names, by default all."""
        numbers = torch.zeros(self.places[-1] + 1, dtype=torch.uint8)
        numbers[self.places] = torch.arange(len(self.places), dtype=torch.uint8)
        found = numbers.to(indices.device).take(indices - self._corners(indices))
        if passes is not None:
            found = found.masked_fill_(~passes, self.stops)
        found = found.flatten()
        if self.stops >= 16:
            return found
        pairs = F.pad(found, (0, found.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def widen(self, narrow: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Indices of the output's shape, within the plane, and where the gradient stops."""
        if self.stops < 16:
            narrow = torch.stack((narrow & 15, narrow >> 4), 1).flatten()[: math.prod(shape)]
        numbers, stops = narrow.view(*shape), narrow.view(*shape) == self.stops
        places = torch.tensor(self.places, device=narrow.device)
        indices = places.take(numbers.masked_fill(stops, 0).long()).add_(self._corners(numbers))
        return indices.clamp_(0, math.prod(self.plane) - 1), stops  # a window that stops may begin in the padding


class Plane:
    """Where windows differ in size: the narrowest integer that holds an index into the plane."""

    def __init__(self, plane: Sequence[int]) -> None:
        size = math.prod(plane)
        self.dtype = torch.uint8 if size <= 1 << 8 else torch.int16 if size <= 1 << 15 else torch.int32

    def narrow(self, indices: Tensor) -> Tensor:
        return indices.to(self.dtype).flatten()

    def widen(self, narrow: Tensor, shape: Sequence[int]) -> tuple[Tensor, None]:
        return narrow.long().view(*shape), None


class MaxPool(torch.autograd.Function):
    """`native` returns output and indices; `back` is the native backward, without its first three arguments' places.

    `rectified`: `native` is that of ReLU and the pool behind it. The gradient stops at maxima that are not positive,
    which the output tells.
    """

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, x: Tensor, native: Any, back: Any, places: Window | Plane, rectified: bool = False
    ) -> Any:
        output, indices = native(x)
        ctx.layout, ctx.back, ctx.places = (x.shape, x.stride(), x.dtype, x.device), back, places
        ctx.shape, ctx.rectified = indices.shape, rectified
        if rectified:
            assert isinstance(places, Window)
            narrow = places.narrow(indices, ~(output <= 0))
        else:
            narrow = places.narrow(indices)
        ctx.save_for_backward(narrow)
        ctx.mark_non_differentiable(indices)
        if slot.group.observed:
            note(slot, ctx, "indices", x, slice(0, 1), indices.nbytes)
        return output, indices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (narrow,) = ctx.saved_tensors
        shape, stride, dtype, device = ctx.layout
        x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        indices, stops = ctx.places.widen(narrow, ctx.shape)
        grad = grads[0].masked_fill(stops, 0) if ctx.rectified else grads[0]
        return None, ctx.back(grad, x, indices), None, None, None, None


class AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, x: Tensor, native: Any, back: Any) -> Tensor:
        ctx.layout, ctx.back = (x.shape, x.stride(), x.dtype, x.device), back
        if slot.group.observed:
            note(slot, ctx, "shape", x)
        return native(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        shape, stride, dtype, device = ctx.layout
        x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return None, ctx.back(grads[0], x), None, None


def _max_pool(dims: int) -> Callable[..., Any]:
    native = getattr(F, f"max_pool{dims}d_with_indices")
    torch_dims = max(dims, 2)  # torch has one dimension as two
    forward = getattr(torch.ops.aten, f"max_pool{torch_dims}d_with_indices")
    backward = getattr(torch.ops.aten, f"max_pool{torch_dims}d_with_indices_backward")

    def max_pool(
        key: str,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        rectify: str | None = None,
    ) -> Any:
        """`rectify` names a ReLU to be run first, "relu" or "relu_", whose bits need not be kept."""
        kernel, padded, dilated = (each(v, dims) for v in (kernel_size, padding, dilation))
        ours = needs_graph(input) and input.dim() > dims
        if rectify is not None and not (ours and math.prod(kernel) < 256):
            input, rectify = relu(key, input, rectify == "relu_"), None
        if not ours:
            found = native(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
            return found if return_indices else found[0]
        steps = each(stride, dims) if stride not in (None, (), []) else kernel
        x, sizes = input, [kernel, steps, padded, dilated]
        if dims == 1:
            x, sizes = input.unsqueeze(-2), [[first, *v] for first, v in zip((1, 1, 0, 1), sizes, strict=True)]
        kernel, steps, padded, dilated = sizes

        def run(x: Tensor) -> Any:
            x = x if rectify is None else getattr(torch, rectify)(x)
            return forward(x, kernel, steps, padded, dilated, ceil_mode)

        def back(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
            return backward(g, x, kernel, steps, padded, dilated, ceil_mode, indices)

        window = Window(x.shape[-torch_dims:], kernel, steps, padded, dilated)
        slot = find_slot(key, input)
        places = window if window.fits() else Plane(x.shape[-torch_dims:])
        output, indices = mark(MaxPool.apply(slot, x, run, back, places, rectify is not None), slot)
        if dims == 1:
            output, indices = output.squeeze(-2), indices.squeeze(-2)
        return (output, indices) if return_indices else output

    max_pool.__name__ = max_pool.__qualname__ = f"max_pool{dims}d"
    return max_pool


def _with_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    """The variant that always returns indices, whatever it is asked."""

    def max_pool_with_indices(
        key: str,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        return pool(key, input, kernel_size, stride, padding, dilation, ceil_mode, True)

    max_pool_with_indices.__name__ = max_pool_with_indices.__qualname__ = f"{pool.__name__}_with_indices"
    return max_pool_with_indices


max_pool1d, max_pool2d, max_pool3d = _max_pool(1), _max_pool(2), _max_pool(3)
max_pool1d_with_indices, max_pool2d_with_indices, max_pool3d_with_indices = map(
    _with_indices, (max_pool1d, max_pool2d, max_pool3d)
)


def _run_average(key: str, input: Tensor, native: Any, back: Any) -> Tensor:
    slot = find_slot(key, input)
    return mark(AveragePool.apply(slot, input, native, back), slot)


def avg_pool2d(
    key: str,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    return _avg_pool(2, key, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(
    key: str,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    return _avg_pool(3, key, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _avg_pool(dims: int, key: str, input: Tensor, kernel: Any, stride: Any, *options: Any) -> Tensor:
    padding, *rest = options
    stride = stride if stride not in (None, (), []) else kernel
    sizes = [each(v, dims) for v in (kernel, stride, padding)]
    forward, backward = getattr(F, f"avg_pool{dims}d"), getattr(aten, f"avg_pool{dims}d_backward")
    if not needs_graph(input):
        return forward(input, *sizes, *rest)
    return _run_average(key, input, lambda x: forward(x, *sizes, *rest), lambda g, x: backward(g, x, *sizes, *rest))


def avg_pool1d(
    key: str,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    kernel, padded = each(kernel_size, 1), each(padding, 1)
    steps = each(stride, 1) if stride not in (None, (), []) else kernel
    if not needs_graph(input):
        return F.avg_pool1d(input, kernel, steps, padded, ceil_mode, count_include_pad)
    sizes = ([1, *kernel], [1, *steps], [0, *padded])
    return avg_pool2d(key, input.unsqueeze(-2), *sizes, ceil_mode, count_include_pad).squeeze(-2)


def adaptive_avg_pool2d(key: str, input: Tensor, output_size: Any) -> Tensor:
    size = _output_size(output_size, input, 2)
    if not needs_graph(input) or size == [1, 1]:  # a mean, which keeps nothing
        return F.adaptive_avg_pool2d(input, size)
    return _run_average(key, input, lambda x: F.adaptive_avg_pool2d(x, size), aten._adaptive_avg_pool2d_backward)


def adaptive_avg_pool3d(key: str, input: Tensor, output_size: Any) -> Tensor:
    size = _output_size(output_size, input, 3)
    if not needs_graph(input) or size == [1, 1, 1]:
        return F.adaptive_avg_pool3d(input, size)
    return _run_average(key, input, lambda x: F.adaptive_avg_pool3d(x, size), aten._adaptive_avg_pool3d_backward)


def adaptive_avg_pool1d(key: str, input: Tensor, output_size: Any) -> Tensor:
    if not needs_graph(input):
        return F.adaptive_avg_pool1d(input, output_size)
    return adaptive_avg_pool2d(key, input.unsqueeze(-2), [1, *_output_size(output_size, input, 1)]).squeeze(-2)


def _output_size(size: Any, x: Tensor, dims: int) -> Any:
    return [
        x.shape[i - dims] if n is None else n
        for i, n in enumerate(each(size, dims) if size is not None else [None] * dims)
    ]


def _adaptive_max_pool(dims: int) -> Callable[..., Any]:
    forward = getattr(aten, f"adaptive_max_pool{dims}d")
    backward = getattr(aten, f"adaptive_max_pool{dims}d_backward")

    def adaptive_max_pool(key: str, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        size = _output_size(output_size, input, dims)
        if not needs_graph(input):
            found = forward(input, size)
        else:
            slot = find_slot(key, input)
            places = Plane(input.shape[-dims:])
            found = mark(MaxPool.apply(slot, input, lambda x: forward(x, size), backward, places), slot)
        return found if return_indices else found[0]

    adaptive_max_pool.__name__ = adaptive_max_pool.__qualname__ = f"adaptive_max_pool{dims}d"
    return adaptive_max_pool


adaptive_max_pool2d, adaptive_max_pool3d = _adaptive_max_pool(2), _adaptive_max_pool(3)


def adaptive_max_pool1d(key: str, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    size = [1, *_output_size(output_size, input, 1)]
    output, indices = adaptive_max_pool2d(key, input.unsqueeze(-2), size, True)
    output, indices = output.squeeze(-2), indices.squeeze(-2)
    return (output, indices) if return_indices else output
