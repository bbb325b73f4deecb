"""A recorded call gives the plan that Dynamo's capture gives; what cannot be recorded is left to Dynamo."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx import zoo
from surgeon_fx.passes.record import CannotRecord, record
from surgeon_fx.planner import facts
from surgeon_fx.planner.plan import Plan


class Spelled(nn.Module):
    """Operators, methods, tuples, buffers, in-place functions and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.offset = torch.ones(8, 1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.relu(self.norm(self.conv(x)))
        x = self.relu(self.again(self.again(x))) + self.offset
        first, second = x.chunk(2, dim=1)
        gate = (1 - first).sigmoid() * second
        gate[:, 0] = 0
        biggest, _ = (2**gate).max(dim=1)
        return {"map": x @ x.mT, "biggest": biggest}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.softmax(q @ k.transpose(-2, -1) * 8**-0.5, dim=-1) @ v


CASES = {
    "spelled": (Spelled, (2, 3, 20, 20)),
    "resnet": (lambda: zoo.create("resnet20_cifar"), (2, 3, 32, 32)),
    "transformer": (lambda: zoo.create("vit_cifar"), (2, 3, 32, 32)),
    "attention": (Attention, (2, 40, 32)),
    "two heads": (lambda: nn.MultiheadAttention(32, 2, batch_first=True), (2, 40, 32)),
}


def plans(model: nn.Module, shape: Any, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Plan, Plan]:
    """The plan of a recorded call, and that of Dynamo's capture."""
    inputs = (shape,) * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    found = []
    for recorded in (True, False):
        with monkeypatch.context() as patched:
            if recorded:
                patched.setattr(facts.Backend, "__init__", _refuse_dynamo(facts.Backend.__init__))
            else:
                patched.setattr(facts, "record", _cannot)
            transformed = surgeon_fx.transform(model, surgeon_fx.Config(return_freed_memory=False, **config))
            found.append(surgeon_fx.plan(transformed, *inputs, ratios=0.9))
    return found[0], found[1]


def _cannot(*_: Any) -> Any:
    raise CannotRecord("it is not wanted")


def _refuse_dynamo(init: Any) -> Any:
    def checked(self: Any, rewrite: Any) -> None:
        assert not torch._dynamo.is_compiling()
        assert not rewrite.captures
        init(self, rewrite)

    return checked


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_plan_is_that_of_dynamo(name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = CASES[name]
    recorded, captured = plans(build(), shape, monkeypatch, fuse_attention=fuse)
    assert recorded.saved_bytes == captured.saved_bytes
    assert recorded.peak_bytes == captured.peak_bytes
    assert recorded.rows == captured.rows
    assert recorded.layers == captured.layers


def test_fused_attention_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = plans(Attention(), (2, 400, 32), monkeypatch)
    fused, _ = plans(Attention(), (2, 400, 32), monkeypatch, fuse_attention=True)
    assert fused.saved_bytes < plain.saved_bytes / 2


def test_graph_says_what_ran() -> None:
    model, x = Spelled(), torch.randn(2, 3, 20, 20)
    graph, given = record(model, (x,), {})
    nodes = list(graph.graph.nodes)
    assert given[0] is x
    assert {torch.conv2d, operator.setitem, operator.pow, "sigmoid", "chunk"} <= {node.target for node in nodes}
    inner = [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes if node.target is torch.conv2d]
    assert inner == ["conv", "again", "again"]
    assert all("test_record.py" in node.meta["stack_trace"] for node in nodes if node.target is torch.conv2d)
    expected = model(x)
    for ours, theirs in zip(graph(*given), expected.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class NoGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return self.linear(x / scale)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class OwnFunction(NoGradients):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Doubled.apply(self.linear(x)))


class LeavesOne(NoGradients):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last.relu()


class Checkpointed(NoGradients):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=False).relu()


class Autocast(NoGradients):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)


class Elsewhere(NoGradients):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + ELSEWHERE


ELSEWHERE = torch.ones(64)


@pytest.mark.parametrize("build", [NoGradients, OwnFunction, LeavesOne, Checkpointed, Autocast, Elsewhere])
def test_what_cannot_be_recorded_is_left_to_dynamo(build: type[nn.Module]) -> None:
    with pytest.raises(CannotRecord):
        record(build(), (torch.randn(128, 64),), {})
    model = surgeon_fx.transform(build())
    planned = surgeon_fx.plan(model, (128, 64), ratios=0.9)
    surgeon_fx.ratios(model).fill(0.9)
    held = surgeon_fx.explain(model, torch.randn(128, 64)).held_bytes
    assert planned.saved_bytes == held > 0
