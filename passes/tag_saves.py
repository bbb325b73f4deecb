"""Tag: a typed record in `node.meta["saving"]` for every node that keeps something for backward.

The record says which rule of the registry answers for the node and which layer it belongs to; the rewrite, the planner
and `explain` read it. The layer is the owner of the node's weight, or else the layer whose output the node reads: the
nearest one upstream, along first inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.registry import Rule, rule_for
from surgeon_fx.passes.watch import modules_around

SAVING = "saving"
TWO_ACTIVATIONS = "attention"  # written out
REASONS = {"attention": "attention keeps q, k, v and its output"}


@dataclass(frozen=True)
class Saving:
    """What is known of a node that saves: `rule` is a family of the registry, or "exact" for what stays as it is."""

    rule: str
    layer: str  # its name in the ratio table; empty if there is none upstream
    key: str  # of the layer, as operations want it
    reason: str = ""
    sharers: tuple[str, ...] = ()  # layers whose inputs are rebuilt from what this node keeps
    source: str = ""  # the layer whose save the node's input is rebuilt from
    hands_on: bool = False  # an activation whose output can be rebuilt


def saving_of(node: fx.Node) -> Saving | None:
    return node.meta.get(SAVING)


@dataclass(frozen=True)
class Layers:
    """What a graph needs to be told of the model it was captured from."""

    parameters: Mapping[
        fx.Node, str | None
    ]  # placeholders that hold one: the key of its layer, None if it stays native
    buffers: Set[fx.Node]  # placeholders that hold a buffer
    modules: Mapping[str, str]  # the identity of a layer's module, as Dynamo writes it down: its key
    none: str  # the key that stands for no layer


def tag_saves_pass(gm: fx.GraphModule, layers: Layers) -> PassResult:
    changed = False
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        rule = rule_for(node.target, node.kwargs)
        if rule is None or rule.family == "exact":
            if (reason := _keeps_exactly(node)) is not None:
                key = _layer_of(node, layers)
                changed |= _tag(node, Saving("exact", _name(key), key, reason))
            continue
        if rule.family == "product" and len(_tensors(node)) < 2 and _is_arithmetic(node):
            continue  # by a number: nothing is saved
        owned = _owner(node, rule, layers)
        if owned is None:
            continue  # filtered out
        key = owned or _layer_of(node, layers)
        if rule.family == "linear" and not owned and not _parameters_behind(node.all_input_nodes, layers):
            saving = Saving(TWO_ACTIVATIONS, _name(key), key, "a product of two activations needs both")
        else:
            saving = Saving(rule.family, _name(key), key, REASONS.get(rule.family, ""))
        changed |= _tag(node, saving)
    return PassResult(gm, changed)


def _tag(node: fx.Node, saving: Saving) -> bool:
    """Whether the node was not tagged so before."""
    before, node.meta[SAVING] = saving_of(node), saving
    return before != saving


def _name(key: str) -> str:
    return key.partition(":")[2]


def function_name(node: fx.Node) -> str:
    """Of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_arithmetic(node: fx.Node) -> bool:
    return function_name(node).strip("_") in ("mul", "div", "truediv", "multiply", "divide", "true_divide")


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Its operands that are tensors; one that is given twice counts twice."""
    given = (*node.args, *node.kwargs.values())
    return [x for x in given if isinstance(x, fx.Node) and isinstance(x.meta.get("example_value"), Tensor)]


def _owner(node: fx.Node, rule: Rule, layers: Layers) -> str | None:
    """The key of the layer that owns a weight of the node; empty if there is no weight, None if it stays native."""
    args = list(node.args)
    if args and isinstance(args[-1], (list, tuple)) and rule.op.__name__ == "einsum":
        args = [*args[:-1], *args[-1]]
    for weight in rule.weights_among(args, node.kwargs):
        if isinstance(weight, fx.Node):
            for placeholder in _parameters_behind([weight], layers):
                key = layers.parameters[placeholder]
                if key is None or _name(key):
                    return key
    return ""


def _parameters_behind(nodes: list[fx.Node], layers: Layers) -> list[fx.Node]:
    """Parameters that one of the nodes is, or was computed from without any activation."""
    for node in nodes:
        found: list[fx.Node] = []
        ahead, seen, pure = [node], set(), True
        while ahead and pure:
            one = ahead.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in layers.parameters:
                found.append(one)
            elif one.op == "placeholder":
                pure = one in layers.buffers or not isinstance(one.meta.get("example_value"), Tensor)
            ahead.extend(reversed(one.all_input_nodes))
        if pure and found:
            return found
    return []


def _layer_of(node: fx.Node, layers: Layers) -> str:
    """The key of the layer a node without a weight follows: the one it runs in, or the nearest that it reads from."""
    for identity in reversed(modules_around(node)):
        if identity in layers.modules:
            return layers.modules[identity]
    seen: set[fx.Node] = set()
    ahead = list(reversed(_differentiable_inputs(node)))
    while ahead:
        one = ahead.pop()
        if one in seen or one in layers.parameters:
            continue
        seen.add(one)
        saving = saving_of(one)
        if saving is not None and saving.rule != "exact" and saving.layer:
            return saving.key
        ahead.extend(reversed(_differentiable_inputs(one)))
    return layers.none


def _differentiable_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if requires_grad(n)]


def requires_grad(node: fx.Node) -> bool:
    return any(x.requires_grad for x in _values(node))


def _values(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("example_value")
    for x in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(x, Tensor):
            yield x


# Functions that keep an activation as it is, by name, and why. What is not listed keeps nothing that depends on it, or
# is asked of autograd by `explain`, which sees every save.
EXACT = {
    "softmax": "softmax keeps its output",
    "log_softmax": "log-softmax keeps its output",
    "baddbmm": "a product of two activations needs both",
    "embedding": "an embedding keeps its indices",
    "grid_sample": "grid sampling keeps its input and its grid",
    "cumsum": "",
    "rsqrt": "a reciprocal root keeps its output",
    "sqrt": "a root keeps its output",
    "reciprocal": "a reciprocal keeps its output",
    "log": "a logarithm keeps its input",
    "abs": "an absolute value keeps its input",
    "amax": "a maximum keeps its input",
    "amin": "a minimum keeps its input",
    "prod": "a product keeps its factors",
    "std": "a deviation keeps its input",
    "var": "a variance keeps its input",
}


def _keeps_exactly(node: fx.Node) -> str | None:
    return EXACT.get(function_name(node)) if requires_grad(node) else None
