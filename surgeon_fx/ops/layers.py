"""Which policy a module or a function runs under: the one registry of what is rewritten.

A row says what an operation keeps for backward. To add an operation, add a row; to add a way of keeping, add a policy.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from surgeon_fx.ops.policies import POLICIES, Normalise, Policy, Pool, between, is_parameter
from surgeon_fx.ops.runtime import Rewrite, run, state
from surgeon_fx.ops.saved import Window

SMOOTH = (nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.PReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
OTHER_POOLS = (*AVERAGES, *ADAPTIVE, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)

MODULES: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((_ConvNd, nn.Linear, nn.RMSNorm), "prune"),
    ((_NormBase, nn.LayerNorm, nn.GroupNorm), "norm"),
    ((nn.MultiheadAttention,), "attention"),
    ((nn.ReLU,), "sign"),
    ((nn.LeakyReLU,), "positive"),
    ((nn.ReLU6,), "relu6"),
    ((nn.Hardtanh,), "hardtanh"),
    ((nn.Hardsigmoid,), "hardsigmoid"),
    (SMOOTH, "prune"),
    (DROPOUTS, "dropout"),
    ((*MAX_POOLS, *OTHER_POOLS), "pool"),
)
LAYERS = (_ConvNd, nn.Linear, nn.RMSNorm, _NormBase, nn.LayerNorm, nn.GroupNorm, nn.MultiheadAttention)

# A layer in functional form: the first argument is the activation, other tensors are weights and statistics.
LAYER_FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, F.linear, F.rms_norm), "prune"),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), "prune"),
    **dict.fromkeys((F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm), "norm"),
}
MAX_POOL_FUNCTIONS = (
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices),
)
# Of a parameter and an activation: a layer written out. Of two activations: attention, and not ours to prune.
MATRIX_PRODUCTS: tuple[Callable[..., Any], ...] = (
    *(operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
)
PRODUCTS: tuple[Callable[..., Any], ...] = (
    *(operator.mul, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.addcmul, Tensor.addcmul),
)
POWERS: tuple[Callable[..., Any], ...] = (operator.pow, torch.pow, Tensor.pow, Tensor.__pow__)
CLAMPS = (torch.clamp, Tensor.clamp, torch.clamp_min, Tensor.clamp_min, torch.clamp_max, Tensor.clamp_max)
# Of what these keep, only what comes in first may be pruned: the rest is divided by.
QUOTIENTS: tuple[Callable[..., Any], ...] = (
    *(operator.truediv, torch.div, Tensor.div, Tensor.__truediv__, F.normalize),
    *(torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm),
)
SDPA = F.scaled_dot_product_attention
FUNCTIONS: dict[Callable[..., Any], str] = {
    **LAYER_FUNCTIONS,
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), "sign"),
    **dict.fromkeys((F.relu6,), "relu6"),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), "positive"),
    **dict.fromkeys((F.hardsigmoid,), "hardsigmoid"),
    **dict.fromkeys((F.gelu, F.silu, F.hardswish, F.mish, F.softplus, F.elu, F.celu, F.selu, F.prelu), "prune"),
    **dict.fromkeys((F.logsigmoid, F.softsign, F.tanhshrink, F.glu), "prune"),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, Tensor.sigmoid, torch.tanh, F.tanh, Tensor.tanh), "prune"),
    **dict.fromkeys((torch.square, Tensor.square, torch.exp, Tensor.exp, torch.sin, torch.cos), "prune"),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), "dropout"),
    **dict.fromkeys((*MAX_POOL_FUNCTIONS, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), "pool"),
    **dict.fromkeys((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), "pool"),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), "pool"),
    **dict.fromkeys(CLAMPS, "clamp"),
    **dict.fromkeys(POWERS, "power"),
    **dict.fromkeys(QUOTIENTS, "inputs"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(MATRIX_PRODUCTS, "matrix"),
    SDPA: "exact",
}
METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(Tensor, name)
    for name in (
        *("relu", "relu_", "sigmoid", "tanh", "square", "exp", "mul", "matmul", "mm", "bmm", "addcmul"),
        *("pow", "clamp", "clamp_min", "clamp_max", "div", "norm"),
    )
}
BROADCAST = 8  # an operand of a product so many times smaller than the other is kept exactly: it gates all of it


def has_ratio(module: nn.Module) -> bool:
    """Whether a module has a row in the ratio table: a layer of torch, or of another library, told by its name."""
    if isinstance(module, LAYERS):
        return True
    name = type(module).__name__
    return (name == "Conv1D" or "Norm" in name) and module._parameters.get("weight") is not None


def module_kind(module: nn.Module) -> str | None:
    """The policy for a layer of torch's own. Subclasses that bring their own forward are rewritten from inside."""
    for types, kind in MODULES:
        if isinstance(module, types):
            native: Any = next(t for t in type(module).__mro__ if t.__module__.startswith("torch.nn"))
            return kind if type(module).forward is native.forward else None
    return None


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments, one level of nesting deep."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


@cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, once a function: it is asked for on every call."""
    return inspect.signature(function)


def run_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of the registry under its policy, at the ratio of the layer it belongs to."""
    if not torch.is_grad_enabled() or state.policies:
        return function(*args, **kwargs)
    tensors = tensors_in((*args, *kwargs.values()))
    ratio = state.sessions[-1].ratio(tensors) if state.sessions else 0.0
    policy = _function_policy(function, ratio, tensors, args, kwargs)
    policy.owner = state.sessions[-1].running if state.sessions else None
    return run(policy, function, *args, **kwargs)


def _function_policy(
    function: Callable[..., Any], ratio: float, tensors: list[Tensor], args: Any, kwargs: Any
) -> Policy:
    kind = FUNCTIONS[function]
    if function in LAYER_FUNCTIONS:
        policy = POLICIES[kind](ratio, tensors[:1], tensors[1:])
        if function is F.batch_norm:
            called = _bound(F.batch_norm, args, kwargs)
            _batch_statistics(
                policy, *(called[k] for k in ("training", "running_mean", "running_var", "eps", "weight"))
            )
        return policy
    if kind in ("product", "matrix"):
        largest = max((x.numel() for x in tensors), default=0)
        small = BROADCAST if kind == "product" else largest + 1
        weights = [x for x in tensors if is_parameter(x) or x.numel() * small <= largest]
        if kind == "matrix" and not any(is_parameter(x) for x in tensors):
            return POLICIES["unknown"](ratio)
        return POLICIES["prune"](ratio, [x for x in tensors if all(x is not w for w in weights)], weights)
    if kind == "power":
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        return POLICIES["prune" if isinstance(exponent, int) and exponent >= 2 else "unknown"](ratio, tensors)
    if kind == "clamp":
        return _clamp_policy(function, ratio, args, kwargs)
    policy = POLICIES[kind](ratio, tensors[:1] if kind == "inputs" else tensors)
    if isinstance(policy, Pool) and tensors and tensors[0].dim() > 2:
        if function in MAX_POOL_FUNCTIONS:
            called = _bound(F.max_pool2d_with_indices, args, kwargs)
            sizes = [called[k] for k in ("kernel_size", "stride", "padding", "dilation")]
            _set_window(policy, tensors[0], int(function.__name__.split("pool")[1][0]), *sizes)
        elif "adaptive_max" in function.__name__:
            policy.plane = tensors[0].shape[-int(function.__name__[-2]) :]
    return policy


def _clamp_policy(function: Callable[..., Any], ratio: float, args: Any, kwargs: Any) -> Policy:
    """One bit per element, where both ends are numbers."""
    ends = dict(zip(("input", "max" if "max" in function.__name__ else "min", "max"), args, strict=False)) | kwargs
    low, high = ends.get("min"), ends.get("max")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return POLICIES["unknown"](ratio)
    passes = CLAMP_PASSES[low is not None, high is not None]
    return between(-math.inf if low is None else low, math.inf if high is None else high, passes)(ratio)


def _clamp_passes(low: float | None, high: float | None) -> tuple[bool, bool, bool]:
    """Whether clamp passes the gradient at its lower end, its upper end and NaN: asked of torch, version by version."""
    with torch.enable_grad(), torch.inference_mode(False):
        asked = torch.tensor([low or 0.0, high or 0.0, math.nan], dtype=torch.float64, requires_grad=True)
        (passed,) = torch.autograd.grad(torch.clamp(asked, low, high).sum(), asked)
    return low is not None and bool(passed[0]), high is not None and bool(passed[1]), bool(passed[2])


CLAMP_PASSES = {
    (low is not None, high is not None): _clamp_passes(low, high)
    for low, high in ((1.0, 2.0), (1.0, None), (None, 2.0))
}


def _bound(like: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    called = signature_of(like).bind(*args, **kwargs)
    called.apply_defaults()
    return called.arguments


def _batch_statistics(
    policy: Policy, training: bool, mean: Tensor | None, variance: Tensor | None, eps: float, weight: Tensor | None
) -> None:
    assert isinstance(policy, Normalise)
    policy.weight = weight
    if not training and mean is not None and variance is not None:
        policy.use_running(mean, variance, eps)


def _set_window(policy: Pool, x: Tensor, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    def each(value: Any) -> Sequence[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)

    policy.plane = x.shape[-dims:]
    policy.window = Window(policy.plane, each(kernel), each(stride or kernel), each(padding), each(dilation))


class FunctionMode(TorchFunctionMode):
    """Runs functions of the registry under their policies, in Python that could not be traced."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (run_function if func in FUNCTIONS else _plain)(func, *args, **(kwargs or {}))


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class LayerForward:
    """The forward of a rewritten layer: the layer's own, under its policy. `name` if it has a ratio of its own."""

    def __init__(self, layer: nn.Module, kind: str, name: str | None, rewrite: Rewrite, outermost: bool) -> None:
        self.layer, self.kind, self.name, self.rewrite, self.outermost = layer, kind, name, rewrite, outermost

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or state.policies:
            return type(self.layer).forward(self.layer, *args, **kwargs)
        return self.rewrite.session(self.outermost, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy(args, kwargs)
        policy.owner = self.rewrite.running
        return run(policy, type(self.layer).forward, self.layer, *args, **kwargs)

    def _policy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        layer, rewrite = self.layer, self.rewrite
        rewrite.running = self.name or rewrite.running
        weights = [*layer.parameters(), *layer.buffers()]
        inputs = tensors_in((*args, *kwargs.values()))
        ratio = rewrite.ratio()
        if isinstance(layer, nn.Hardtanh):
            return between(layer.min_val, layer.max_val)(ratio, inputs, weights)
        policy = POLICIES[self.kind](ratio, inputs, weights)
        if isinstance(layer, _ConvNd):
            policy.needs_input = layer.weight.requires_grad
        elif isinstance(layer, _BatchNorm):
            training = layer.training or layer.running_mean is None
            _batch_statistics(policy, training, layer.running_mean, layer.running_var, layer.eps, layer.weight)
        elif isinstance(policy, Pool) and inputs and inputs[0].dim() > 2:
            if isinstance(layer, MAX_POOLS):
                dims = MAX_POOLS.index(next(t for t in MAX_POOLS if isinstance(layer, t))) + 1
                _set_window(policy, inputs[0], dims, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            elif "Adaptive" in type(layer).__name__:
                policy.plane = inputs[0].shape[-int(type(layer).__name__[-2]) :]
        return policy
