"""Compilers: `torch.compile` around a transformed model, and our own backend as the second door."""

import copy

import pytest
import torch
from model_cases import assert_equal, step
from torch._dynamo.testing import CompileCounterWithBackend

import surgeon_fx
from surgeon_fx.retained import retained_bytes

SHAPES = {"tv:resnet18": (4, 3, 64, 64), "vit_cifar": (4, 3, 32, 32)}
RATIOS = (0.5, 0.0, 0.95, 0.8, 0.1, 0.3, 0.99, 0.6, 0.7, 0.2)

pytestmark = pytest.mark.filterwarnings("ignore")  # the compilers' own


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def held_and_gradients(run, model, x):
    model.zero_grad()
    torch.manual_seed(0)
    out = run(x)
    held = retained_bytes(out, model)
    out.square().mean().backward()
    return held, {name: p.grad.clone() for name, p in model.named_parameters()} | {"output": out.detach()}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_compiler_around_a_transformed_model(name, backend):
    torch.manual_seed(0)
    model, x = surgeon_fx.zoo.create(name), torch.randn(SHAPES[name])
    state = copy.deepcopy(model.state_dict())
    transformed = surgeon_fx.transform(model)
    table = surgeon_fx.ratios(transformed)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(transformed, backend=counter, fullgraph=True)
    for ratio in (0.9, 0.0):
        table.fill(ratio)
        held, expected = held_and_gradients(transformed, model, x)
        buffers = copy.deepcopy(dict(model.named_buffers()))
        model.load_state_dict(state)
        compiled_held, actual = held_and_gradients(compiled, model, x)
        for key, value in expected.items():
            assert (actual[key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
        torch.testing.assert_close(dict(model.named_buffers()), buffers)
        model.load_state_dict(state)
        if ratio:
            assert compiled_held <= 1.05 * held
    for ratio in RATIOS:
        table.fill(ratio)
        held_and_gradients(compiled, model, x)
    assert counter.frame_count == 1  # no ratio compiles anything again


def test_the_second_door_runs_the_same_operations():
    torch.manual_seed(0)
    model, x = surgeon_fx.zoo.create("resnet20_cifar").eval(), torch.randn(4, 3, 32, 32)
    transformed = surgeon_fx.transform(model)
    compiled = torch.compile(model, backend="surgeon_fx")
    for ratio in (0.0, 0.9):
        for either in (transformed, compiled):
            surgeon_fx.ratios(either).fill(ratio)
        assert list(surgeon_fx.ratios(compiled)) == list(surgeon_fx.ratios(transformed))
        expected = step(transformed, x)
        actual = {name.removeprefix("_orig_mod."): value for name, value in step(compiled, x).items()}
        assert_equal(actual, expected)
        assert retained_bytes(compiled(x), model) == retained_bytes(transformed(x), transformed)


def test_the_second_door_with_one_ratio():
    model, x = surgeon_fx.zoo.create("resnet20_cifar"), torch.randn(4, 3, 32, 32)
    eager = retained_bytes(model(x), model)
    compiled = torch.compile(model, backend="surgeon_fx", options={"ratio": 0.9})
    assert retained_bytes(compiled(x), model) < 0.2 * eager
    with pytest.raises(Exception, match="has the option 'ratio', got 'keep'"):
        torch.compile(copy.deepcopy(model), backend="surgeon_fx", options={"keep": 1})(x)


def test_a_model_compiled_in_place_is_refused():
    model = surgeon_fx.zoo.create("resnet20_cifar")
    model.compile()
    with pytest.raises(ValueError, match="model is compiled: transform it first"):
        surgeon_fx.transform(model)
