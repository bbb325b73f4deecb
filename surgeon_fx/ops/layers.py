"""Which policy a module or a function runs under: the one registry of what is rewritten.

A row says what an operation keeps for backward. To add an operation, add a row; to add a way of keeping, add a policy.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from surgeon_fx.ops.policies import POLICIES, Normalise, Policy, between, run
from surgeon_fx.ratio_table import RatioTable

SMOOTH = (nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.PReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

MODULES: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((_ConvNd, nn.Linear, nn.RMSNorm), "prune"),
    ((_NormBase, nn.LayerNorm, nn.GroupNorm), "norm"),
    ((nn.ReLU,), "sign"),
    ((nn.LeakyReLU,), "positive"),
    ((nn.ReLU6,), "relu6"),
    ((nn.Hardtanh,), "hardtanh"),
    ((nn.Hardsigmoid,), "hardsigmoid"),
    (SMOOTH, "prune"),
    (DROPOUTS, "dropout"),
    ((*MAX_POOLS, *AVERAGE_POOLS), "pool"),
)
PRUNABLE = (_ConvNd, nn.Linear, nn.RMSNorm, _NormBase, nn.LayerNorm, nn.GroupNorm)  # have a row in the ratio table

# A layer in functional form: the first argument is the activation, other tensors are weights and statistics.
LAYER_FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, F.linear, F.rms_norm), "prune"),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), "prune"),
    **dict.fromkeys((F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm), "norm"),
}
FUNCTIONS: dict[Callable[..., Any], str] = {
    **LAYER_FUNCTIONS,
    F.relu: "sign",
    torch.relu: "sign",
    torch.relu_: "sign",
    F.relu_: "sign",
    F.relu6: "relu6",
    F.leaky_relu: "positive",
    F.hardsigmoid: "hardsigmoid",
    F.gelu: "prune",
    F.silu: "prune",
    F.hardswish: "prune",
    F.mish: "prune",
    F.softplus: "prune",
    F.elu: "prune",
    torch.sigmoid: "prune",
    torch.tanh: "prune",
    F.dropout: "dropout",
    F.max_pool1d: "pool",
    F.max_pool2d: "pool",
    F.max_pool3d: "pool",
    F.avg_pool1d: "pool",
    F.avg_pool2d: "pool",
    F.avg_pool3d: "pool",
}
METHODS = {"relu": "sign", "relu_": "sign", "sigmoid": "prune", "tanh": "prune"}
PRODUCTS = (operator.mul, torch.mul)  # of two activations: gates


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


@lru_cache(maxsize=1)
def _runner() -> Callable[..., Any]:
    """`run`, at which a compiler breaks its graph: made late, because asking for that imports the compiler."""
    return torch.compiler.disable(run)


def run_function(kind: str, ratio: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function under its policy."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    tensors = tensors_in((*args, *kwargs.values()))
    first = 1 if function in LAYER_FUNCTIONS else len(tensors)
    policy = POLICIES[kind](ratio, tensors[:first], tensors[first:])
    if function is F.batch_norm:
        called = signature_of(F.batch_norm).bind(*args, **kwargs)
        called.apply_defaults()
        if not called.arguments["training"]:
            _use_running(policy, *(called.arguments[k] for k in ("running_mean", "running_var", "eps", "weight")))
    return _runner()(policy, function, *args, **kwargs)


def _use_running(
    policy: Policy, mean: Tensor | None, variance: Tensor | None, eps: float, weight: Tensor | None
) -> None:
    if isinstance(policy, Normalise) and mean is not None and variance is not None:
        policy.use_running(mean, variance, eps, weight)


class LayerForward:
    """The forward of a rewritten layer: the layer's own, under its policy, at the ratio of `owner`."""

    def __init__(self, layer: nn.Module, kind: str, owner: str | None, table: RatioTable) -> None:
        self.layer, self.kind, self.owner, self.table = layer, kind, owner, table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        native = type(layer).forward
        if not torch.is_grad_enabled():
            return native(layer, *args, **kwargs)
        return _runner()(self.policy(args, kwargs), native, layer, *args, **kwargs)

    def policy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        layer = self.layer
        weights = [*layer.parameters(), *layer.buffers()]
        inputs = tensors_in((*args, *kwargs.values()))
        ratio = self.table[self.owner] if self.owner is not None else 0.0
        if isinstance(layer, nn.Hardtanh):
            return between(layer.min_val, layer.max_val)(ratio, inputs, weights)
        policy = POLICIES[self.kind](ratio, inputs, weights)
        if isinstance(layer, _ConvNd):
            policy.needs_input = layer.weight.requires_grad
        if isinstance(layer, _NormBase) and not layer.training:
            _use_running(policy, layer.running_mean, layer.running_var, layer.eps, layer.weight)
        return policy
