"""Rewrite: tagged nodes become sparse-saving operations, the rest stays as it was."""

import pytest
import torch
import torch.nn.functional as F
from graph_cases import Function, capture
from torch import nn

import surgeon_fx
from surgeon_fx.passes.pipeline import run_passes
from surgeon_fx.passes.rewrite_saves import rewrite_saves_pass
from surgeon_fx.passes.tag_saves import saving_of, tag_saves_pass

X = torch.randn(5, 33)
IMAGE = torch.randn(2, 3, 17, 17)


def rewritten(gm):
    return [node for node in gm.graph.nodes if getattr(node.target, "__module__", "").startswith("surgeon_fx.ops.")]


SPELLINGS = {
    "function": (lambda h, x: F.gelu(h), "gelu"),
    "method": (lambda h, x: h.sigmoid(), "sigmoid"),
    "operator": (lambda h, x: h * x, "mul"),
    "keyword": (lambda h, x: torch.mul(h, other=x), "mul"),
    "all keywords": (lambda h, x: F.silu(inplace=False, input=h), "silu"),
    "in place": (lambda h, x: F.relu_(h), "relu_"),
    "power": (lambda h, x: h**2, "pow"),
    "matmul": (lambda h, x: x @ h.t(), "matmul"),
    "pool": (lambda h, x: F.adaptive_avg_pool1d(h, output_size=5), "adaptive_avg_pool1d"),
    "clamp": (lambda h, x: h.clamp(min=0.1), "clamp"),
    "attention": (lambda h, x: F.scaled_dot_product_attention(h, value=h, key=h), "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    function, operation = SPELLINGS[name]
    gm, inputs, layers = capture(Function(function), X)
    (expected,) = gm(*inputs)
    tag_saves_pass(gm, layers)
    before = len(gm.graph.nodes)
    result = rewrite_saves_pass(gm)
    assert result.modified
    assert result.graph_module is gm
    gm.graph.lint()
    gm.recompile()
    assert [node.target.__name__ for node in rewritten(gm)] == ["linear", operation]
    assert all(node.args[0] == saving_of(node).key for node in rewritten(gm))
    assert len(gm.graph.nodes) == before
    assert torch.equal(gm(*inputs)[0], expected)
    assert not rewrite_saves_pass(gm).modified
    assert not tag_saves_pass(gm, layers).modified
    assert torch.equal(gm(*inputs)[0], expected)


def test_what_is_kept_exactly_is_left_alone():
    gm, _, layers = capture(Function(lambda h, x: h.cumsum(-1)), X)
    tag_saves_pass(gm, layers)
    rewrite_saves_pass(gm)
    node = next(node for node in gm.graph.nodes if (s := saving_of(node)) is not None and s.rule == "exact")
    assert (node.op, node.target) == ("call_method", "cumsum")


def test_without_tags_nothing_changes():
    gm, _, _ = capture(Function(lambda h, x: F.gelu(h)), X)
    code = gm.code
    assert not rewrite_saves_pass(gm).modified
    gm.recompile()
    assert gm.code == code


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(196, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.5)),
    )


def test_the_pipeline_counts_what_it_took():
    gm, _, layers = capture(network(), IMAGE)
    counts = run_passes(gm, layers, surgeon_fx.Config())
    assert counts == {"conv": 1, "norm": 2, "pool": 1, "linear": 1, "smooth": 1, "dropout": 1}


def test_a_readable_graph_names_our_operations():
    model = surgeon_fx.transform(network())
    (graph,) = surgeon_fx.explain(model, IMAGE).graphs
    text = graph.print_readable(print_output=False)
    for name in ("conv_conv2d", "norm_batch_norm", "pool_max_pool2d", "linear_linear", "smooth_gelu"):
        assert f"surgeon_fx_ops_{name}(" in text
    records = {saving.layer: saving.rule for node in graph.graph.nodes if (saving := saving_of(node)) is not None}
    assert records == {"0": "conv", "1": "pool", "5": "linear", "6": "dropout"}


def test_filtered_layers_stay_native():
    model = surgeon_fx.transform(network(), filter_fn=lambda module, name: name != "0")
    (graph,) = surgeon_fx.explain(model, IMAGE).graphs
    (convolution,) = [node for node in graph.graph.nodes if node.target is torch.conv2d]
    assert saving_of(convolution) is None
    assert "surgeon_fx_ops_conv" not in graph.code
