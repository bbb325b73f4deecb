"""Graphs as Dynamo hands them to the passes, and what the passes are told of the model."""

import torch
from torch import nn

import surgeon_fx
from surgeon_fx.api import rewrite_of
from surgeon_fx.passes.capture import layers_of
from surgeon_fx.passes.tag_saves import saving_of


def capture(model, *inputs, filter_fn=None, **named):
    """One graph of a model, untouched, with its inputs and its layers."""
    rewrite = rewrite_of(surgeon_fx.transform(model, filter_fn=filter_fn))
    found = []

    def backend(gm, example_inputs):
        found.append((gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    plain = surgeon_fx.restore(rewrite.module)
    torch.compile(plain, backend=backend, fullgraph=True)(*inputs, **named)
    ((gm, given),) = found
    rewrite.module, rewrite.layers = plain, {name: plain.get_submodule(name) for name in rewrite.layers}
    gm.rewrite = rewrite  # whose layers live as long as the graph
    return gm, given, layers_of(gm, given, rewrite)


def savings(gm):
    """Rule and layer of every node that is tagged, in order."""
    return [(saving.rule, saving.layer) for node in gm.graph.nodes if (saving := saving_of(node)) is not None]


class Function(nn.Module):
    """A linear layer, and a function of its output and the input."""

    def __init__(self, function, size=33):
        super().__init__()
        self.layer, self.function = nn.Linear(size, size), function

    def forward(self, x):
        return self.function(self.layer(x), x)
