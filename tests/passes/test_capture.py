"""Capture: graphs, why they end, and what runs where no graph is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from graph_cases import savings
from model_cases import assert_equal, step
from torch import nn

import surgeon_fx
from surgeon_fx.api import rewrite_of
from surgeon_fx.passes.watch import source_line

X = torch.randn(40, 33)


class Broken(nn.Module):
    """Leaves its graph once."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(33, 33), nn.Linear(33, 33)

    def forward(self, x):
        x = F.gelu(self.a(x))
        torch._dynamo.graph_break()
        return F.relu(self.b(x))


class Skipped(nn.Module):
    """Runs a part that Dynamo does not look at."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(33, 33), nn.Linear(33, 33)

    @torch._dynamo.disable
    def hidden(self, x):
        return F.gelu(self.b(x))

    def forward(self, x):
        return self.hidden(F.gelu(self.a(x)))


def test_one_graph():
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(33, 33), nn.GELU()))
    found = surgeon_fx.explain(model, X)
    assert len(found.graphs) == 1
    assert not found.breaks
    (capture,) = rewrite_of(model).captures
    assert capture.graph is found.graphs[0]
    assert capture.counts == {"linear": 1, "smooth": 1}
    assert capture.broke is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_break_gives_two_graphs_and_a_reason():
    torch.manual_seed(0)
    model = Broken()
    expected = step(copy.deepcopy(model), X)
    transformed = surgeon_fx.transform(model)
    assert_equal(step(transformed, X), expected)
    found = surgeon_fx.explain(transformed, X)
    assert [savings(graph) for graph in found.graphs] == [
        [("linear", "a"), ("smooth", "a")],
        [("linear", "b"), ("relu", "b")],
    ]
    (broke,) = found.breaks
    assert broke.where.startswith("test_capture.py:")
    assert "graph_break" in broke.reason


def test_what_no_graph_holds_is_interpreted_and_said():
    torch.manual_seed(0)
    model = Skipped()
    expected = step(copy.deepcopy(model), X)
    transformed = surgeon_fx.transform(model)
    assert_equal(step(transformed, X), expected)
    surgeon_fx.ratios(transformed).fill(0.9)
    found = surgeon_fx.explain(transformed, X)
    assert {"linear", "gelu"} <= {one.where for one in found.breaks if one.reason == "ran outside of any graph"}
    interpreted = surgeon_fx.transform(model, surgeon_fx.Config(capture=False))
    surgeon_fx.ratios(interpreted).fill(0.9)
    assert surgeon_fx.explain(interpreted, X).held_bytes == found.held_bytes
    assert not surgeon_fx.explain(interpreted, X).graphs


def test_lines_are_the_models():
    transformed = surgeon_fx.transform(Broken())
    for graph in surgeon_fx.explain(transformed, X).graphs:
        lines = [source_line(node) for node in graph.graph.nodes if node.op.startswith("call")]
        assert all(line.startswith("test_capture.py:") for line in lines)
        assert "runtime.py" not in graph.print_readable(print_output=False)


def test_copies_are_captured_anew():
    transformed = surgeon_fx.transform(nn.Sequential(nn.Linear(33, 33)))
    transformed(X)
    other = copy.deepcopy(transformed)
    assert not rewrite_of(other).captures
    other(X)
    assert len(rewrite_of(other).captures) == len(rewrite_of(transformed).captures) == 1
