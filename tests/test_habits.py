"""What users do with a model, they can do with a transformed one."""

import copy
import io
import weakref

import pytest
import torch
from model_cases import Residual, assert_equal, distributed_step, step
from torch import nn

import surgeon_fx
from surgeon_fx.retained import nodes, retained_bytes, saved_by


def test_drop_in(case):
    model, _ = case
    transformed = surgeon_fx.transform(model)
    assert isinstance(transformed, type(model))
    assert list(transformed.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(transformed.parameters(), model.parameters(), strict=True))
    model.load_state_dict(transformed.state_dict())
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    transformed.eval()
    assert not any(m.training for m in transformed.modules())


def test_copies_and_pickles(case):
    model, x = case
    transformed = surgeon_fx.transform(model.eval())
    surgeon_fx.ratios(transformed).fill(0.5)
    expected = step(transformed, x)
    buffer = io.BytesIO()
    torch.save(transformed, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(transformed), torch.load(buffer, weights_only=False)):
        assert_equal(step(other, x), expected)
        surgeon_fx.ratios(other).fill(0.0)
        assert not torch.equal(step(other, x)["input"], expected["input"])
        assert next(iter(surgeon_fx.ratios(transformed).values())) == 0.5


def test_no_grad_costs_nothing(case):
    model, x = case
    transformed = surgeon_fx.transform(model.eval())
    with torch.no_grad():
        assert torch.equal(transformed(x), model(x))
    with torch.inference_mode():
        out = transformed(x)
    assert out.is_inference()
    assert torch.equal(out, model(x))


def test_autocast(case):
    model, x = case
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = step(copy.deepcopy(model.eval()), x)
        transformed = surgeon_fx.transform(model)
        assert_equal(step(transformed, x), expected)
        surgeon_fx.ratios(transformed).fill(0.9)
        assert torch.equal(step(transformed, x)["output"], expected["output"])


def test_checkpoint_around_a_transformed_part(case):
    model, x = case
    expected = step(copy.deepcopy(model.eval()), x)
    transformed = surgeon_fx.transform(model)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = transformed

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    actual = step(Checkpointed(), x)
    assert_equal({name.removeprefix("inner."): g for name, g in actual.items()}, expected)


def test_optional_arguments_and_hooks():
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 8, 10, 10)
    transformed = surgeon_fx.transform(model)
    scale = torch.full((1,), 2.0)
    assert torch.equal(transformed(x, scale), model(x, scale))
    assert torch.equal(transformed(x, scale=None), model(x))
    seen = []
    transformed.conv1.register_forward_hook(lambda m, a, out: seen.append("forward"))
    transformed.conv1.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    transformed(x.requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]


def test_shared_module_and_tied_weight():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(16, 16))
    model[3].weight = layer.weight
    x = torch.randn(30, 16)
    expected = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model)
    assert transformed[0] is transformed[2]
    assert_equal(step(transformed, x), expected)


def test_gradient_accumulation_and_nan(case):
    model, x = case
    transformed = surgeon_fx.transform(model.eval())
    surgeon_fx.ratios(transformed).fill(0.5)
    once = step(transformed, x)
    transformed(x).square().mean().backward()
    name, parameter = next((n, p) for n, p in transformed.named_parameters() if n.endswith("weight"))
    torch.testing.assert_close(parameter.grad, 2 * once[name])
    poisoned = x.clone()
    poisoned.view(-1)[7] = torch.nan
    assert step(transformed, poisoned)[name].isnan().any()


def test_in_place_change_of_a_saved_tensor_is_an_error():
    model, x = surgeon_fx.transform(nn.Sequential(nn.Linear(8, 8))), torch.randn(4, 8)
    h = x * 1
    out = model(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiles(case):
    model, x = case
    transformed = surgeon_fx.transform(model.eval())  # tests/test_compile.py has pruned ones
    expected = step(transformed, x)
    torch._dynamo.reset()
    actual = step(torch.compile(transformed, backend="aot_eager"), x)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name if name in actual else f"_orig_mod.{name}"], value)


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_made_before_or_after(case, before):
    model, x = case
    model.eval()
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if before else None
    transformed = surgeon_fx.transform(model)
    optimizer = optimizer or torch.optim.SGD(transformed.parameters(), 0.1)
    for _ in range(3):
        for one, its in ((reference, eager), (transformed, optimizer)):
            its.zero_grad()
            one(x).square().mean().backward()
            its.step()
    assert_equal(dict(transformed.named_parameters()), dict(reference.named_parameters()))


def test_moves_to_another_dtype(case):
    model, x = case
    transformed = surgeon_fx.transform(copy.deepcopy(model).eval()).to(torch.float64)
    assert_equal(step(transformed, x.double()), step(model.eval().double(), x.double()))
    surgeon_fx.ratios(transformed).fill(0.9)
    assert step(transformed, x.double())["input"].isfinite().all()


def test_double_backward_is_exact_or_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(40, 64, requires_grad=True)

    def penalty(m):
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(m.parameters()), allow_unused=True)

    transformed = surgeon_fx.transform(model)
    for actual, expected in zip(penalty(transformed), penalty(model), strict=True):
        assert (actual is None and expected is None) or torch.equal(actual, expected)
    surgeon_fx.ratios(transformed).fill(0.5)
    with pytest.raises(RuntimeError, match="double backward .* its ratio must be 0"):
        penalty(transformed)


def test_a_transformed_part_is_refused():
    part = surgeon_fx.transform(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="its part 1 is already transformed"):
        surgeon_fx.transform(nn.Sequential(nn.Linear(2, 2), part))
    outer = nn.Sequential(nn.Linear(2, 2), part)  # around it, untransformed: fine
    outer(torch.ones(1, 2)).sum().backward()


def test_parts_called_on_their_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 2)), torch.randn(100, 64)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.9)
    out = transformed[0](x)
    assert torch.equal(out, model[0](x))
    assert retained_bytes(out, transformed) < 0.5 * retained_bytes(model[0](x), model)


def test_nothing_of_a_step_outlives_it(case):
    model, x = case
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed).fill(0.5)
    out = transformed(x)
    assert retained_bytes(out, transformed) > 0
    out.sum().backward()
    assert retained_bytes(out, transformed) == 0
    out = transformed(x)
    kept = [weakref.ref(one) for node in nodes(out) for one in saved_by(node) if one is not None]
    kept = [one for one in kept if all(one() is not p for p in transformed.parameters())]
    assert kept
    del out
    assert not [one for one in kept if one() is not None]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_distributed(tmp_path):
    torch.multiprocessing.spawn(distributed_step, (tmp_path / "store", tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert_equal(first, second)
    torch.manual_seed(0)
    model, means = Residual().eval(), {}
    for rank in range(2):
        torch.manual_seed(rank)
        x = torch.randn(2, 8, 6, 6)
        model.zero_grad()
        model(x).square().mean().backward()
        for name, p in model.named_parameters():
            means[name] = means.get(name, 0) + p.grad / 2
    for name, expected in means.items():
        torch.testing.assert_close(first[name], expected)


def test_hooks_are_the_copys_own():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda *_: seen.append("before"))
    transformed = surgeon_fx.transform(model)
    transformed[0].register_forward_hook(lambda *_: seen.append("copy"))
    model(torch.ones(1, 4))
    assert seen == ["before"]
    transformed(torch.ones(1, 4))
    assert seen == ["before", "before", "copy"]
