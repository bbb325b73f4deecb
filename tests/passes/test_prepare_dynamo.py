"""What Dynamo is told: models are captured as eager runs them, once for all batch sizes, and others are left alone."""

import logging
import threading

import pytest
import torch
import torch._dynamo.variables.torch as dynamo
from torch import nn

import surgeon_fx
from surgeon_fx.api import rewrite_of
from surgeon_fx.ops.interpreter import Interpreter
from surgeon_fx.passes import prepare_dynamo


class Asks(nn.Module):
    """Tells what it is told: doubles its output where it is compiled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(33, 33)

    def forward(self, x):
        return self.layer(x) * (2 if torch.compiler.is_compiling() else 1)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))


def test_one_more_capture_for_all_batch_sizes():
    model = surgeon_fx.transform(network())
    for batch in (4, 8, 15, 16, 40, 2):
        model(torch.randn(batch, 3, 12, 12)).sum().backward()
    assert len(rewrite_of(model).captures) == 2


def test_other_compilers_get_dynamos_answers():
    model, x = Asks(), torch.randn(4, 33)
    plain = model(x)
    found = {}

    def run(name, compiled):
        for _ in range(3):
            found[name] = compiled(x)

    ours, theirs = surgeon_fx.transform(model), torch.compile(Asks(), backend="eager")
    theirs.load_state_dict({f"_orig_mod.{k}": v for k, v in model.state_dict().items()})
    threads = [threading.Thread(target=run, args=one) for one in (("ours", ours), ("theirs", theirs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found["ours"], plain)
    torch.testing.assert_close(found["theirs"], 2 * plain)


def test_other_compilers_keep_their_guard():
    """Theirs may depend on the library that runs a convolution."""
    surgeon_fx.transform(network())(torch.randn(2, 3, 12, 12))
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(network(), backend=backend, dynamic=True)
    for batch in (4, 8, 40):
        compiled(torch.randn(batch, 3, 12, 12))
    assert len(graphs) == 2


@pytest.mark.parametrize(("place", "name"), [(torch._C, "_select_conv_backend"), (dynamo, "tracing_state_functions")])
def test_without_a_private_function(place, name, monkeypatch, caplog):
    """Another torch may lack it: models are captured all the same."""
    monkeypatch.setattr(prepare_dynamo, "_prepared", False)
    for one in ((Interpreter, "_call"), (torch._C, "_select_conv_backend"), (dynamo, "tracing_state_functions")):
        monkeypatch.setattr(*one, getattr(*one))  # put back afterwards
    monkeypatch.delattr(place, name)
    with caplog.at_level(logging.WARNING, "surgeon_fx"):
        prepare_dynamo.prepare_dynamo(object)
    assert name in caplog.text
    assert prepare_dynamo._prepared
