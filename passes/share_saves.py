"""Chains that keep one save: norm -> activation -> conv or linear, and smooth activation -> conv or linear.

Tags alone: the norm or activation that starts a chain is told which layers its save serves, the activations inside it
hand it on. The rewrite puts that into the graph; what runs is in `surgeon_fx/ops/share.py`.

norm -> sum -> conv or linear, with activations in between: the places that the norm keeps serve what is behind the sum.
The sum, which no rule takes, is replaced here.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from surgeon_fx.ops.registry import rule_for
from surgeon_fx.ops.share import ACTIVATIONS, STARTS, adding, is_sum
from surgeon_fx.ops.slots import sharing_key
from surgeon_fx.passes.tag_saves import SAVING, function_name, requires_grad, saving_of

# Functions that may leave elements where they are in memory, dropout when it drops nothing: what runs looks again.
VIEWS = frozenset(
    (
        *(
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "permute",
            "transpose",
            "contiguous",
            "squeeze",
            "unsqueeze",
            "mT",
        ),
        "dropout",
    )
)


def share_saves_pass(gm: fx.GraphModule) -> PassResult:
    inside: set[fx.Node] = set()  # activations that hand on what a norm keeps
    changed = False
    for node in gm.graph.nodes:
        saving = saving_of(node)
        if saving is None or not saving.layer or node in inside or not (_is_norm(node) or _activation(node) in STARTS):
            continue
        users, between, leaves = _behind(node)
        sums = _rewrite_sums(node) if _is_norm(node) else 0
        if not users and not sums and not leaves:
            continue
        inside.update(between)
        names = (one.layer for user in users if (one := saving_of(user)) is not None and one.layer != saving.layer)
        sharers = tuple(dict.fromkeys(names))
        node.meta[SAVING] = replace(
            saving, key=sharing_key(saving.key, sharers), sharers=sharers, hands_on=not _is_norm(node)
        )
        for user in users:
            user.meta[SAVING] = replace(user.meta[SAVING], source=saving.layer)
        for activation in between:
            activation.meta[SAVING] = replace(activation.meta[SAVING], hands_on=True)
        changed = True
    return PassResult(gm, changed)


def _rewrite_sums(norm: fx.Node) -> int:
    """Has sums of a norm's output hand on the places that it keeps, where somebody behind them prunes; how many do."""
    count = 0
    for node in list(norm.users):
        if not _is_sum(node):
            continue
        users, between, leaves = _behind(node)
        if users or leaves:
            function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
            node.op, node.target = "call_function", adding(function)
            for activation in between:
                activation.meta[SAVING] = replace(activation.meta[SAVING], hands_on=True)
            count += 1
    return count


def _is_sum(node: fx.Node) -> bool:
    values = [x.meta.get("example_value") if isinstance(x, fx.Node) else x for x in node.args]
    return node.op in ("call_function", "call_method") and is_sum(node.target, values)


def _behind(start: fx.Node) -> tuple[list[fx.Node], list[fx.Node], bool]:
    """Nodes behind one, through views and activations, that keep their input pruned, and the activations.

    Also, whether one may be outside of the graph: then it is for whoever reads it there.
    """
    users: list[fx.Node] = []
    between: list[fx.Node] = []
    leaves = False
    ahead, seen = [start], {start}
    while ahead:
        node = ahead.pop()
        for user in node.users:
            leaves |= user.op == "output"
            if user in seen or not user.args or user.args[0] is not node or not requires_grad(user):
                continue
            seen.add(user)
            activation = _activation(user)
            if _is_layer(user) or activation in STARTS:
                users.append(user)
            if activation is not None:
                between.append(user)
            if activation is not None or function_name(user) in VIEWS:
                ahead.append(user)
    return users, between, leaves


def _is_norm(node: fx.Node) -> bool:
    saving = saving_of(node)
    return saving is not None and saving.rule == "norm" and function_name(node) != "instance_norm"


def _is_layer(node: fx.Node) -> bool:
    """A conv or linear layer that trains its weight."""
    saving, rule = saving_of(node), rule_for(node.target)
    if saving is None or rule is None or saving.rule not in ("conv", "linear") or not saving.layer:
        return False
    weights = rule.weights_among(node.args, node.kwargs)
    return any(isinstance(x, fx.Node) and x is not node.args[0] and requires_grad(x) for x in weights)


def _activation(node: fx.Node) -> str | None:
    rule = rule_for(node.target) if node.op in ("call_function", "call_method") else None
    name = None if rule is None or saving_of(node) is None else rule.op.__name__
    return name if name in ACTIVATIONS else None
