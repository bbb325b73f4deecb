"""`transform`: exact at ratio 0, lighter in memory, and a drop-in for the model."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgeon_fx
from surgeon_fx.kernels import compress, decompress, kept_count
from surgeon_fx.retained import retained_bytes


class Residual(nn.Module):
    """Every way to write an activation, a shared input, a gate, dropout."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, channels, 1)
        self.norm2 = nn.GroupNorm(2, channels)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="reflect", groups=2)
        self.squeeze = nn.Conv2d(channels, channels, 1)

    def forward(self, x, scale=None):
        h = F.relu(self.norm1(x))
        out = self.conv2(self.act(self.norm2(self.conv1(h))))
        gate = torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(out, 1)))
        out = F.dropout(out * gate, 0.3, self.training) + self.shortcut(h)
        return out if scale is None else out * scale


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.unused, self.empty = nn.Linear(2, 2), nn.Sequential()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if x.shape[0] > 1000:  # control flow on data: this level stays Python
            return None
        x = F.leaky_relu(self.norm(self.up(x)))
        return self.head(F.silu(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return (x + self.fc2(F.gelu(self.fc1(self.norm2(x)))))[:, 0]


MODELS = {"network": (Network, (4, 3, 24, 24)), "attention": (Attention, (3, 40, 16))}


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    build, shape = MODELS[request.param]
    return build(), torch.randn(shape)


def step(model, x):
    """Output, input gradient and every parameter gradient of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": x.grad, **gradients}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_exact_at_ratio_zero(case, training, layout):
    model, x = case
    if layout == "channels_last" and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    model.train(training)
    expected = step(copy.deepcopy(model), x)
    assert_equal(step(surgeon_fx.transform(model), x), expected)


@pytest.mark.parametrize("training", [True, False])
def test_forward_is_exact_when_pruned(case, training):
    model, x = case
    model.train(training)
    expected = step(copy.deepcopy(model), x)
    pruned = surgeon_fx.transform(model)
    surgeon_fx.ratios(pruned).fill(0.9)
    actual = step(pruned, x)
    assert torch.equal(actual["output"], expected["output"])
    assert actual.keys() == expected.keys()
    assert all(gradient.isfinite().all() for gradient in actual.values())
    assert not torch.equal(actual["input"], expected["input"])


def pruned_by_hand(x, ratio):
    flat = x.flatten()
    keep = flat.abs().topk(kept_count(flat.numel(), ratio)).indices
    return torch.zeros_like(flat).index_put_((keep,), flat[keep]).view_as(x)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3), (8, 4, 64)),
        (nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2, padding=1), (8, 4, 20, 20)),
        (nn.Conv3d(4, 6, 3), (2, 4, 9, 9, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 4, 17, 17)),
        (nn.Linear(32, 8), (5, 16, 32)),
    ],
)
def test_weight_gradients_are_those_of_the_pruned_input(layer, shape):
    torch.manual_seed(0)
    x, model = torch.randn(shape), nn.Sequential(layer)
    eager = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed)["0"] = 0.9
    actual = step(transformed, x)

    out = layer(x)
    pruned = pruned_by_hand(x, 0.9)
    (expected,) = torch.autograd.grad(layer(pruned), layer.weight, grad_outputs=2 * out.detach() / out.numel())
    torch.testing.assert_close(actual["0.weight"], expected)
    for exact in ("output", "input", "0.bias"):
        assert torch.equal(actual[exact], eager[exact])


@pytest.mark.parametrize(
    ("layer", "shape", "dims"),
    [
        (nn.BatchNorm2d(6), (8, 6, 12, 12), (0, 2, 3)),
        (nn.LayerNorm(48), (16, 10, 48), (2,)),
        (nn.InstanceNorm2d(6, affine=True), (8, 6, 12, 12), (2, 3)),
    ],
)
def test_norm_gradients_are_those_of_the_pruned_normalised_input(layer, shape, dims):
    torch.manual_seed(0)
    nn.init.uniform_(layer.weight)
    x, model = torch.randn(shape) * 3 + 2, nn.Sequential(layer)
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed)["0"] = 0.8
    actual = step(transformed, x)

    std, mean = torch.var_mean(x, dims, unbiased=False, keepdim=True)
    std = (std + layer.eps).sqrt()
    hat = decompress(compress((x - mean) / std, 0.8))
    g = 2 * actual["output"] / actual["output"].numel()
    per_channel = (1, -1, *([1] * (x.dim() - 2))) if layer.weight.numel() == x.shape[1] else (1, 1, -1)
    others = [d for d in range(x.dim()) if per_channel[d] == 1]
    torch.testing.assert_close(actual["0.weight"], (g * hat).sum(others))
    torch.testing.assert_close(actual["0.bias"], g.sum(others))
    gw = g * layer.weight.detach().view(per_channel)
    expected = (gw - gw.mean(dims, keepdim=True) - hat * (gw * hat).mean(dims, keepdim=True)) / std
    torch.testing.assert_close(actual["input"], expected, atol=1e-7, rtol=1e-3)


def test_memory_goes_away():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
    model, x = surgeon_fx.transform(block), torch.randn(16, 8, 32, 32)
    dense = x.nbytes
    out = model(x)
    bits, statistics = dense // 32, 2 * 8 * 4
    # x, the norm's input, the second conv's input
    assert retained_bytes(out, model) == 3 * dense + bits + statistics
    out.sum().backward()
    assert retained_bytes(out, model) == 0
    surgeon_fx.ratios(model).fill(0.9)
    out = model(x)
    pruned = kept_count(x.numel(), 0.9) * 4 + bits
    assert retained_bytes(out, model) == 3 * pruned + bits + statistics


def test_a_tensor_is_kept_once_at_the_highest_keep():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x) + self.b(x)

    model, x = surgeon_fx.transform(Fork()), torch.randn(256, 64)
    surgeon_fx.ratios(model).update({"a": 0.9, "b": 0.5})
    out = model(x)
    assert retained_bytes(out, model) == kept_count(x.numel(), 0.5) * 4 + x.numel() // 8


def test_frozen_layers_save_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    model.requires_grad_(False)
    model[3].bias.requires_grad_(True)
    transformed, x = surgeon_fx.transform(model), torch.randn(2, 3, 20, 20)
    out = transformed(x)
    assert retained_bytes(out, transformed) == 0
    out.sum().backward()
    assert model[3].bias.grad is not None


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
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiles(case):
    model, x = case
    transformed = surgeon_fx.transform(model.eval())
    surgeon_fx.ratios(transformed).fill(0.9)
    expected = step(transformed, x)
    torch._dynamo.reset()
    actual = step(torch.compile(transformed, backend="aot_eager"), x)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name if name in actual else f"_orig_mod.{name}"], value)


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        surgeon_fx.transform(3)
    with pytest.warns(surgeon_fx.NoEffectWarning, match="nothing to rewrite"):
        surgeon_fx.transform(nn.Identity())
    model = surgeon_fx.transform(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="already transformed"):
        surgeon_fx.transform(model)
    with pytest.raises(ValueError, match="call surgeon_fx.transform"):
        surgeon_fx.ratios(nn.Linear(2, 2))


def test_filter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    transformed = surgeon_fx.transform(model, filter_fn=lambda module, name: name == "1")
    assert list(surgeon_fx.ratios(transformed)) == ["1"]
