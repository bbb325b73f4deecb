"""Function -> saving rule: the one table that both drivers, the planner and `explain` read.

A row says which operation of ours takes the place of a function, and where the function's weight stands among its
arguments: the operation belongs to the layer that owns the weight. An operation without one follows the layer whose
output it reads. To add an operation, add a file beside this one and a row here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon_fx.ops import attention, conv, dropout, exact, linear, norm, pool, product, relu, smooth

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one function is rewritten: `op` is called with the key of a layer and the function's own arguments."""

    family: str
    op: Function
    weights: tuple[tuple[int, str], ...] = ()  # position and name of arguments that may be a layer's weight

    def weights_among(self, args: Any, kwargs: Any) -> list[Any]:
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.weights]
        return [x for x in found if x is not None]


LAYERS = ("conv", "linear", "norm")  # families of the layers in a ratio table
SECOND, FIRST_TWO = ((1, "weight"),), ((0, "input"), (1, "other"))


def _rows(
    family: str, room: Any, names: str, weights: tuple[tuple[int, str], ...] = (), *where: Any
) -> dict[Any, Rule]:
    """Rows for the functions called so in `torch.nn.functional`, `torch` and `Tensor`, wherever they exist."""
    return {
        function: Rule(family, getattr(room, name), weights)
        for name in names.split()
        for place in where or (F, torch, Tensor)
        if callable(function := getattr(place, name, None))
    }


RULES: dict[Function, Rule] = {
    **_rows("conv", conv, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", SECOND),
    **_rows("linear", linear, "linear", SECOND, F),
    **_rows("linear", linear, "matmul", FIRST_TWO),
    **_rows("linear", linear, "mm bmm", ((0, "input"), (1, "mat2"))),
    **_rows("linear", linear, "addmm", ((1, "mat1"), (2, "mat2"))),
    **_rows("linear", linear, "einsum", ((1, "operands"), (2, "operands")), torch),
    **_rows("norm", norm, "batch_norm instance_norm", ((3, "weight"),), F),
    **_rows("norm", norm, "layer_norm group_norm rms_norm", ((2, "weight"),), F),
    **_rows("norm", norm, "layer_norm group_norm rms_norm", ((2, "weight"),), torch),
    **_rows(
        "relu",
        relu,
        "relu relu_ relu6 leaky_relu leaky_relu_ threshold hardtanh hardsigmoid clamp clip clamp_min clamp_max",
    ),
    **_rows(
        "smooth", smooth, "gelu silu hardswish mish softplus elu celu selu logsigmoid glu softsign tanhshrink", (), F
    ),
    **_rows("smooth", smooth, "sigmoid tanh exp square sin cos pow"),
    **_rows("smooth", smooth, "prelu", (), F, torch),
    **_rows("dropout", dropout, "dropout", (), F, torch),
    **_rows("product", product, "mul addcmul div", FIRST_TWO, torch, Tensor),
    **_rows("product", product, "norm", (), torch, Tensor),
    **_rows("product", product, "vector_norm", (), torch.linalg),
    **_rows("product", product, "normalize", (), F),
    **_rows("attention", attention, "scaled_dot_product_attention", (), F),
    **_rows("attention", attention, "multi_head_attention_forward", ((5, "in_proj_weight"), (20, "q_proj_weight")), F),
    **_rows("exact", exact, "softmax log_softmax sqrt rsqrt reciprocal log abs std var amax amin"),
    **_rows("pool", pool, "max_pool1d max_pool2d max_pool3d", (), F),
    **_rows("pool", pool, "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices", (), F),
    **_rows("pool", pool, "avg_pool1d avg_pool2d avg_pool3d", (), F),
    **_rows("pool", pool, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", (), F),
    **_rows("pool", pool, "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", (), F),
}
# Operators, as FX writes them and as Python calls them.
RULES |= {
    operator.mul: RULES[torch.mul],
    operator.truediv: RULES[torch.div],
    operator.matmul: RULES[torch.matmul],
    operator.pow: RULES[torch.pow],
    **dict.fromkeys((torch.multiply, Tensor.multiply), RULES[torch.mul]),
    **dict.fromkeys((torch.divide, torch.true_divide, Tensor.divide, Tensor.true_divide), RULES[torch.div]),
    **{
        getattr(Tensor, f"__{name}__"): RULES[getattr(torch, function)]
        for name, function in (("mul", "mul"), ("truediv", "div"), ("matmul", "matmul"), ("pow", "pow"))
    },
}


def rule_for(target: Any, kwargs: Mapping[str, Any] | None = None) -> Rule | None:
    """The rule of a function, or of a tensor method given by its name.

    A call that is given its output has none: autograd does not record it.
    """
    if kwargs and kwargs.get("out") is not None:
        return None
    if isinstance(target, str):
        target = getattr(Tensor, target, None)
    try:
        return RULES.get(target)
    except TypeError:  # not hashable
        return None
