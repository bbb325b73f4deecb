"""`explain`: every tensor that backward keeps alive, who saves it and why it is as large as it is."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import surgeon_fx
from surgeon_fx.kernels import kept_count
from surgeon_fx.retained import retained_bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        return torch.cumprod(self.out(h), 1)  # nothing we know


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.transpose(-2, -1)) / 32**0.5).softmax(-1) @ v


class Dropped(nn.Module):
    """Attention with dropout, which torch writes out in its own operations."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


CUBES = {
    "operator": lambda x: x**3,
    "operator of a float": lambda x: x**3.0,
    "function of a float": lambda x: torch.pow(x, 3.0),
    "method of a float": lambda x: x.pow(3.0),
}


class Cube(nn.Module):
    def __init__(self, cube):
        super().__init__()
        self.layer, self.cube = nn.Linear(64, 64), cube

    def forward(self, x):
        return self.cube(self.layer(x))


X = torch.randn(4, 8, 32, 32)


def test_rows_of_an_untransformed_model():
    model = Block()
    found = surgeon_fx.explain(model, X)
    assert not found.transformed
    assert found.handled_share == 0
    assert found.held_bytes == found.dense_bytes == retained_bytes(model(X), model)
    assert {row.reason for row in found.rows} == {"the model is not transformed"}


def test_rows_of_a_transformed_model():
    model = surgeon_fx.transform(Block())
    surgeon_fx.ratios(model).fill(0.9)
    found = surgeon_fx.explain(model, X)
    assert found.held_bytes == retained_bytes(model(X), model)
    rows = {(row.layer, row.operation): row for row in found.rows}
    pruned = kept_count(X.numel(), 0.9) * 4 + X.numel() // 8
    assert rows["conv", "Convolution"].held_bytes == pruned
    assert rows["norm", "BatchNorm"].handled
    shared = rows["", "Rectify, Convolution"]  # the output of one is the input of the other
    assert shared.held_bytes == pruned + X.numel() // 8
    left = next(row for row in found.rows if "Cumprod" in row.operation)
    assert not left.handled
    assert left.reason == "Cumprod needs it exactly"
    assert left.held_bytes == left.dense_bytes == X.nbytes
    assert all(row.source.startswith("test_explain.py:") for row in found.rows if row.dense_bytes > 4096)
    assert 0.5 < found.handled_share < 1
    text = str(found)
    assert "Cumprod needs it exactly" in text
    assert "malloc:" in text


def test_source_lines_are_those_of_the_model():
    import inspect

    lines, begin = inspect.getsourcelines(Block.forward)
    model = surgeon_fx.transform(Block())
    rows = surgeon_fx.explain(model, X).rows
    relu = next(row for row in rows if row.operation.startswith("Rectify"))
    assert relu.source == f"test_explain.py:{begin + next(i for i, text in enumerate(lines) if 'relu' in text)}"


def test_written_out_attention_is_named_and_can_be_fused():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 64, 32)
    kept = surgeon_fx.explain(surgeon_fx.transform(model), x)
    assert "fuse_attention" in str(kept)
    fused = surgeon_fx.transform(model, surgeon_fx.Config(fuse_attention=True))
    found = surgeon_fx.explain(fused, x)
    assert "fuse_attention" not in str(found)
    assert found.held_bytes < kept.held_bytes
    torch.testing.assert_close(fused(x), model(x))


def test_a_custom_function_is_seen():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.detach() + 1
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return Keep.apply(self.layer(x))

    model, x = Model(), torch.randn(100, 64)
    found = surgeon_fx.explain(surgeon_fx.transform(model, surgeon_fx.Config(capture=False)), x)
    assert [row.dense_bytes for row in found.rows if row.reason == "Keep needs it exactly"] == [x.nbytes]


def test_what_is_held_whole_has_a_reason():
    model, x = surgeon_fx.transform(Dropped()), torch.randn(4, 64, 32)
    surgeon_fx.ratios(model).fill(0.9)
    whole = [row for row in surgeon_fx.explain(model, x).rows if row.held_bytes >= row.dense_bytes > 4096]
    assert any("Softmax" in row.operation for row in whole)
    assert [row.operation for row in whole if not row.reason] == []


def test_copies_that_autocast_makes_of_weights():
    """None is kept beside its weight, or the table says what it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Conv1d(1, 64, 64))
    model.insert(3, nn.Unflatten(1, (1, 256)))
    transformed, x = surgeon_fx.transform(model), torch.randn(64, 256)
    surgeon_fx.ratios(transformed).fill(0.9)
    with torch.autocast("cpu", torch.bfloat16):
        found = surgeon_fx.explain(transformed, x)
    shapes = {p.shape for p in model.parameters()}
    assert [row for row in found.rows if row.shape in shapes and "autocast" not in row.reason] == []
    assert found.held_bytes < 0.3 * found.dense_bytes


@pytest.mark.parametrize("cube", CUBES)
def test_a_power_is_pruned_however_it_is_written(cube):
    model, x = surgeon_fx.transform(Cube(CUBES[cube])), torch.randn(100, 64)
    surgeon_fx.ratios(model).fill(0.9)
    assert retained_bytes(model(x), model) == 2 * (kept_count(x.numel(), 0.9) * 4 + x.numel() // 8)


def test_what_the_process_holds_is_what_is_counted():
    """To the byte: whatever forward leaves allocated is either counted or the output."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.Hardtanh())))
    transformed, x = surgeon_fx.transform(model), torch.randn(100, 64)
    surgeon_fx.ratios(transformed).fill(0.9)
    transformed(x)  # captures
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = transformed(x)
    left = sum(event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    assert left == retained_bytes(out, transformed) + out.nbytes
    assert left == surgeon_fx.plan(transformed, x).saved_bytes + out.nbytes
