"""Attention written out in any spelling becomes `scaled_dot_product_attention`; what only looks like it does not."""

import math

import pytest
import torch
import torch.nn.functional as F
from graph_cases import capture
from torch import nn

import surgeon_fx
from surgeon_fx.passes.fuse_attention import fuse_attention_pass
from surgeon_fx.retained import retained_bytes

SIZE, SHAPE = 16, (2, 4, 33, 16)


class Attention(nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.bias = nn.Parameter(torch.randn(33, 33))
        self.register_buffer("mask", torch.randn(33, 33))
        self.spelling = spelling

    def forward(self, x):
        return self.spelling(self.q(x), self.k(x), self.v(x), self)


def flat(x):
    return x.flatten(0, 1)


MATCHES = {
    "operators": lambda q, k, v, m: (q @ k.transpose(-2, -1)).softmax(-1) @ v,
    "functions": lambda q, k, v, m: torch.matmul(torch.softmax(torch.matmul(q, k.mT), dim=-1), v),
    "methods": lambda q, k, v, m: q.matmul(k.transpose(2, 3)).softmax(dim=-1).matmul(v),
    "batches": lambda q, k, v, m: torch.bmm(F.softmax(torch.bmm(flat(q), flat(k).mT), dim=-1), flat(v)),
    "batches by keyword": lambda q, k, v, m: torch.bmm(
        F.softmax(torch.bmm(flat(q), mat2=flat(k).mT), dim=2), mat2=flat(v)
    ),
    "dimension by number": lambda q, k, v, m: F.softmax(q @ k.mT, dim=3) @ v,
    "scaled": lambda q, k, v, m: ((q @ k.mT) * 0.25).softmax(-1) @ v,
    "scaled by keyword": lambda q, k, v, m: torch.mul(q @ k.mT, other=0.25).softmax(-1) @ v,
    "everything by keyword": lambda q, k, v, m: torch.matmul(
        input=F.softmax(input=torch.mul(input=torch.matmul(input=q, other=k.mT), other=0.25), dim=-1), other=v
    ),
    "divided": lambda q, k, v, m: ((q @ k.mT) / math.sqrt(SIZE)).softmax(-1) @ v,
    "divided by keyword": lambda q, k, v, m: torch.div(q @ k.mT, other=4).softmax(-1) @ v,
    "scaled in place": lambda q, k, v, m: (q @ k.mT).mul_(0.25).softmax(-1) @ v,
    "scaled twice": lambda q, k, v, m: ((q @ k.mT) * 0.5 / 2).softmax(-1) @ v,
    "query scaled": lambda q, k, v, m: ((q * 0.25) @ k.mT).softmax(-1) @ v,
    "mask": lambda q, k, v, m: ((q @ k.mT) * 0.25 + m.mask).softmax(-1) @ v,
    "mask by keyword": lambda q, k, v, m: torch.add(q @ k.mT, other=m.mask).softmax(-1) @ v,
    "mask in place": lambda q, k, v, m: (q @ k.mT).add_(m.mask).softmax(-1) @ v,
    "mask of another type": lambda q, k, v, m: (q @ k.mT + m.mask.bfloat16()).softmax(-1) @ v,
    "learned bias": lambda q, k, v, m: (q @ k.mT + m.bias).softmax(-1) @ v,
    "dropout, evaluated": lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.5, training=False) @ v,
    "dropout by keyword": lambda q, k, v, m: F.dropout(input=(q @ k.mT).softmax(-1), p=0.0) @ v,
    "cast": lambda q, k, v, m: (q @ k.mT).softmax(-1).to(q.dtype) @ v,
}
OTHERS = {
    "softmax over queries": lambda q, k, v, m: (q @ k.mT).softmax(-2) @ v,
    "map is used again": lambda q, k, v, m: (p := (q @ k.mT).softmax(-1)) @ v + p.mean(),
    "scores are used again": lambda q, k, v, m: (s := q @ k.mT).softmax(-1) @ v + s.mean(),
    "no softmax": lambda q, k, v, m: (q @ k.mT).sigmoid() @ v,
    "number added": lambda q, k, v, m: (q @ k.mT + 1.0).softmax(-1) @ v,
    "scaled by a tensor": lambda q, k, v, m: ((q @ k.mT) * m.bias).softmax(-1) @ v,
    "mask added twice": lambda q, k, v, m: torch.add(q @ k.mT, m.mask, alpha=2).softmax(-1) @ v,
    "rounded": lambda q, k, v, m: torch.div(q @ k.mT, 4, rounding_mode="floor").softmax(-1) @ v,
    "in another precision": lambda q, k, v, m: F.softmax(q @ k.mT, dim=-1, dtype=torch.float64) @ v.double(),
    "in another precision by place": lambda q, k, v, m: torch.softmax(q @ k.mT, -1, torch.float64) @ v.double(),
    "of one memory for all": lambda q, k, v, m: (q @ m.q.weight).softmax(-1) @ m.v.weight,
    "map first": lambda q, k, v, m: v.mT @ (q @ k.mT).softmax(-1),
    "two products": lambda q, k, v, m: (q @ k.mT) @ v,
}


def attention_nodes(gm):
    return [node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention]


@pytest.mark.parametrize("name", MATCHES)
def test_matches(name):
    torch.manual_seed(0)
    gm, inputs, _ = capture(Attention(MATCHES[name]), torch.randn(SHAPE))
    (expected,) = gm(*inputs)
    result = fuse_attention_pass(gm)
    assert result.modified
    gm.graph.lint()
    gm.recompile()
    assert len(attention_nodes(gm)) == 1
    assert "softmax" not in gm.code
    torch.testing.assert_close(gm(*inputs)[0], expected)
    assert not fuse_attention_pass(gm).modified


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_alone(name):
    gm, inputs, _ = capture(Attention(OTHERS[name]), torch.randn(SHAPE))
    (expected,) = gm(*inputs)
    code = gm.code
    assert not fuse_attention_pass(gm).modified
    gm.recompile()
    assert gm.code == code
    assert torch.equal(gm(*inputs)[0], expected)


@pytest.mark.parametrize("name", MATCHES)
def test_gradients_and_bytes_of_a_fused_model(name):
    torch.manual_seed(0)
    model, x = Attention(MATCHES[name]), torch.randn(SHAPE)
    fused = surgeon_fx.transform(model, surgeon_fx.Config(fuse_attention=True))
    plain = surgeon_fx.transform(model)
    out = fused(x)
    if name != "learned bias":  # whose gradient needs the map
        assert retained_bytes(out, fused) < retained_bytes(plain(x), plain)
    wanted = [model.q.weight, model.v.bias]
    for actual, expected in zip(
        torch.autograd.grad(out.square().sum(), wanted),
        torch.autograd.grad(model(x).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_what_fused_attention_keeps_is_shared():
    """Its output is kept exactly: a projection after it keeps nothing more."""

    class Projected(Attention):
        def __init__(self):
            super().__init__(MATCHES["scaled"])
            self.out = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return self.out(super().forward(x))

    model = surgeon_fx.transform(Projected(), surgeon_fx.Config(fuse_attention=True))
    x = torch.randn(SHAPE)
    surgeon_fx.ratios(model).fill(0.9)
    with_projection = retained_bytes(model(x), model)
    graph = surgeon_fx.explain(model, x).graphs[0]
    assert "surgeon_fx_ops_attention_scaled_dot_product_attention" in graph.code
    surgeon_fx.ratios(model)["out"] = 0.0
    assert retained_bytes(model(x), model) == with_projection
