"""Checkpointed regions: their bodies are rewritten, and run as eager runs them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from graph_cases import capture, savings
from model_cases import assert_equal, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx.passes.pipeline import run_passes
from surgeon_fx.passes.rewrite_checkpoints import rewrite_checkpoints_pass, run_checkpointed
from surgeon_fx.retained import retained_bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(33, 33), nn.Linear(33, 33), nn.BatchNorm1d(33)

    def body(self, x, scale=1.0):
        return F.dropout(F.gelu(self.norm(self.a(x))) * self.b(x) * scale, 0.2, self.training)

    def forward(self, x):
        return checkpoint(self.body, x, scale=2.0, use_reentrant=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(33, 33), nn.ModuleList([Block(), Block()]), nn.Linear(33, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


X = torch.randn(64, 33)


def test_bodies_are_rewritten():
    gm, _, layers = capture(Model(), X)
    run_passes(gm, layers, surgeon_fx.Config())
    regions = [node for node in gm.graph.nodes if node.target is run_checkpointed]
    assert len(regions) == 2
    for i, region in enumerate(regions):
        body = gm.get_submodule(region.args[0].target)
        assert {layer for _, layer in savings(body)} == {f"blocks.{i}.{name}" for name in ("a", "b", "norm")}
        assert "surgeon_fx_ops_linear_linear" in body.code
    assert savings(gm) == [("linear", "stem"), ("linear", "head")]


def test_twice_is_once():
    gm, _, layers = capture(Model(), X)
    rewritten = []

    def rewrite_body(body, layers):
        rewritten.append(body)

    assert rewrite_checkpoints_pass(gm, layers, rewrite_body).modified
    assert len(rewritten) == 2
    assert not rewrite_checkpoints_pass(gm, layers, rewrite_body).modified
    assert len(rewritten) == 2


def test_a_graph_without_regions_is_left_alone():
    gm, _, layers = capture(nn.Sequential(nn.Linear(33, 33)), X)
    assert not rewrite_checkpoints_pass(gm, layers, lambda body, layers: None).modified


@pytest.mark.parametrize("training", [True, False])
def test_exact_at_ratio_zero_and_forward_always(training):
    torch.manual_seed(0)
    model = Model().train(training)
    expected = step(copy.deepcopy(model), X)
    transformed = surgeon_fx.transform(copy.deepcopy(model))
    assert_equal(step(transformed, X), expected)
    pruned = surgeon_fx.transform(copy.deepcopy(model))
    surgeon_fx.ratios(pruned).fill(0.9)
    assert torch.equal(step(pruned, X)["output"], expected["output"])
    statistics = copy.deepcopy(model)
    statistics(X)
    transformed = surgeon_fx.transform(copy.deepcopy(model))
    transformed(X)
    assert torch.equal(transformed.blocks[0].norm.running_mean, statistics.blocks[0].norm.running_mean)


@pytest.mark.parametrize("ratios", [{}, {"blocks.0.a": 0.9}, {"blocks.0.a": 0.9, "blocks.0.b": 0.5, "stem": 0.9}])
def test_holds_no_more_than_eager_with_checkpointing(ratios):
    model = Model()
    eager = retained_bytes(model(X), model)
    transformed = surgeon_fx.transform(copy.deepcopy(model))
    surgeon_fx.ratios(transformed).update(ratios)
    out = transformed(X)
    assert retained_bytes(out, transformed) <= eager
    out.sum().backward()
    assert all(p.grad is not None for p in transformed.parameters())
