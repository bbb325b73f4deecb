"""What a compiler other than ours sees of a transformed model: the `torch.library` ops in place of native functions.

A function that is not listed in `COMPILED` runs natively and keeps what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surgeon_fx.ops.common import each
from surgeon_fx.ops.library import batch_norm, conv2d, gelu, layer_norm, linear, max_pool2d, pack, relu


class CompilerMode(TorchFunctionMode):
    """Puts the ops into the graph that somebody else's compiler traces: Dynamo follows this Python."""

    def __init__(self, layers: Sequence[tuple[nn.Module, str]], none: str) -> None:
        super().__init__()
        self.none, self.last = none, none
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []  # of late
        self.exact: Tensor | None = None  # what attention keeps exactly, through views of it
        self.layers: dict[tuple[int, ...], list[tuple[nn.Module, str]]] = {}
        for module, key in layers:
            if (weight := module._parameters.get("weight")) is not None:
                self.layers.setdefault(tuple(weight.shape), []).append((module, key))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = COMPILED.get(func)
        if function is None:
            output = func(*args, **(kwargs or {}))
            if func is F.scaled_dot_product_attention or (func in VIEWS and args[0] is self.exact):
                self.exact = output
            return output
        return function(self, func, *args, **(kwargs or {}))

    def keep(self, x: Tensor, key: str) -> tuple[Tensor, Tensor]:
        """What is kept of an activation: of one that several operations read, what the first of them made."""
        for known, values, bitmask in self.kept:
            if known is x:
                return values, bitmask
        values, bitmask = pack(x.detach(), key)
        self.kept = [*self.kept[-3:], (x, values, bitmask)]
        return values, bitmask

    def key_of(self, weight: Tensor | None) -> str:
        """The key of the layer that owns a weight; without a weight, of the layer that ran last."""
        if weight is not None:
            for module, key in self.layers.get(tuple(weight.shape), []):
                if module.weight is weight:
                    self.last = key
                    return key
            return self.none
        return self.last


def _compiled_linear(mode: CompilerMode, native: Any, input: Any, weight: Any, bias: Any = None) -> Tensor:
    key = mode.key_of(weight)
    if key == mode.none or not weight.requires_grad or input is mode.exact:
        return native(input, weight, bias)
    return linear(input, weight, bias, *mode.keep(input, key))


def _compiled_conv(
    mode: CompilerMode,
    native: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    key = mode.key_of(weight)
    if key == mode.none or isinstance(padding, str) or input.dim() != 4 or not weight.requires_grad:
        return native(input, weight, bias, stride, padding, dilation, groups)
    sizes = each(stride, 2), each(padding, 2), each(dilation, 2)
    return conv2d(input, weight, bias, *sizes, groups, *mode.keep(input, key))


def _compiled_batch_norm(
    mode: CompilerMode,
    native: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    key = mode.key_of(weight)
    if key == mode.none or not training or momentum is None or input.dtype != torch.float32:
        return native(input, running_mean, running_var, weight, bias, training, momentum, eps)
    output, _, _, mean, rstd = batch_norm(input, weight, bias, eps, key)
    if running_mean is not None:
        with torch.no_grad():
            count = input.numel() / input.shape[1]
            variance = (rstd**-2 - eps) * (count / (count - 1))
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance, momentum)
    return output


def _compiled_layer_norm(
    mode: CompilerMode,
    native: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    key = mode.key_of(weight)
    if key == mode.none:
        return native(input, normalized_shape, weight, bias, eps)
    return layer_norm(input, list(normalized_shape), weight, bias, eps, key)[0]


def _compiled_gelu(mode: CompilerMode, native: Any, input: Any, *, approximate: str = "none") -> Tensor:
    key = mode.key_of(None)
    return (
        native(input, approximate=approximate) if key == mode.none else gelu(input, approximate, *mode.keep(input, key))
    )


def _compiled_relu(mode: CompilerMode, native: Any, input: Any, inplace: bool = False) -> Tensor:
    return relu(input)[0]


def _compiled_max_pool(
    mode: CompilerMode,
    native: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel = each(kernel_size, 2)
    if return_indices or input.dim() != 4 or kernel[0] * kernel[1] >= 256:
        return native(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    steps = kernel if stride is None else each(stride, 2)
    return max_pool2d(input, kernel, steps, each(padding, 2), each(dilation, 2), ceil_mode)[0]


VIEWS = (Tensor.transpose, Tensor.permute, Tensor.reshape, Tensor.view, Tensor.flatten, torch.transpose, torch.permute)
COMPILED: dict[Any, Callable[..., Tensor]] = {
    F.linear: _compiled_linear,
    F.conv2d: _compiled_conv,
    F.batch_norm: _compiled_batch_norm,
    F.layer_norm: _compiled_layer_norm,
    F.gelu: _compiled_gelu,
    F.relu: _compiled_relu,
    F.max_pool2d: _compiled_max_pool,
    torch.relu: _compiled_relu,
    Tensor.relu: _compiled_relu,
}
