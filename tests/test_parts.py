"""Layers of other libraries, and what models do in their forward: exact at ratio 0, forward exact at any."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_cases import assert_equal, step
from torch import nn

import surgeon_fx
from surgeon_fx.kernels import kept_count
from surgeon_fx.retained import retained_bytes


class Parametrised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.linear(self.conv(x).mean((2, 3)))


class LazyBuffer(nn.Module):
    """Builds a table at its first call, as rotary and relative positions do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.linspace(0, 1, 16), persistent=False)
        return F.relu(self.layer(x)) * self.scale


class Detached(nn.Module):
    """Modes that Python sets must survive."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.no_grad():
            h = F.relu(self.a(x))
        return F.gelu(self.b(h + 0 * x))


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


class CustomGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return F.relu(Negate.apply(self.layer(x)))


class Nested(nn.Module):
    """Keyword, nested and optional inputs and outputs; a type asked for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs, *, flag=False, **more):
        x = inputs["x"] if isinstance(inputs, dict) else inputs
        x = F.relu(self.layer(x)) + more.get("y", 0)
        return {"out": (x, [x * 2]) if flag else x}


class TypeAsked(nn.Module):
    """A trace would take the wrong branch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else x[0]
        return F.relu(self.layer(x))


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.layer(self.attention(x, x, x, need_weights=False)[0])


def timm_layers():
    from timm import layers

    return nn.Sequential(
        *(layers.StdConv2d(8, 8, 3, padding=1), layers.BatchNormAct2d(8), layers.ScaledStdConv2d(8, 8, 1)),
        *(layers.LayerNorm2d(8), layers.SqueezeExcite(8), layers.DropPath(0.3), layers.LayerNormAct2d(8)),
        *(layers.GroupNormAct(8, 2), layers.RmsNorm2d(8)),
    )


def torchvision_layers():
    from torchvision.ops import Conv2dNormActivation, FrozenBatchNorm2d, SqueezeExcitation, StochasticDepth

    return nn.Sequential(
        *(Conv2dNormActivation(8, 8, 3), FrozenBatchNorm2d(8), StochasticDepth(0.3, "row"), SqueezeExcitation(8, 4)),
        *(Conv2dNormActivation(8, 8, 3, activation_layer=nn.Hardswish, norm_layer=nn.InstanceNorm2d), nn.Hardsigmoid()),
    )


def activations():
    return nn.Sequential(
        *(nn.Conv2d(8, 8, 1), nn.ReLU6(), nn.Conv2d(8, 8, 1), nn.Hardtanh(-0.5, 0.7), nn.Conv2d(8, 8, 1)),
        *(nn.LeakyReLU(0.2, inplace=True), nn.PReLU(), nn.Mish(), nn.ELU(), nn.Softplus(), nn.Hardsigmoid(), nn.CELU()),
        *(nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.Tanh(), nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.Sigmoid()),
    )


def pools():
    return nn.Sequential(
        *(nn.Conv2d(8, 8, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1), nn.MaxPool2d((2, 3), (1, 2), dilation=2)),
        *(nn.AvgPool2d(2, 1), nn.Conv2d(8, 8, 1), nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
    )


def other_ranks():
    return nn.Sequential(
        *(nn.Flatten(2), nn.Conv1d(8, 8, 3, padding_mode="circular", padding=1), nn.BatchNorm1d(8)),
        *(nn.MaxPool1d(3, 2, 1), nn.ConvTranspose1d(8, 8, 4), nn.Unflatten(2, (2, 4, 6)), nn.Conv3d(8, 8, 2)),
        *(nn.BatchNorm3d(8, affine=False), nn.MaxPool3d((1, 2, 2), 1), nn.ConvTranspose3d(8, 8, 2)),
        nn.InstanceNorm3d(8, track_running_stats=True),
    )


class Functions(nn.Module):
    """What needs care: ends that count, exponents, divisors, in and out of range."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x):
        h = self.a(x)
        ends = torch.cat([h, torch.zeros_like(h), torch.ones_like(h)]) * h.new_ones(1)
        poisoned = torch.where(ends > 0.8, torch.nan, ends)
        bounded = (
            poisoned.clamp(0, 1),
            poisoned.clamp(-1, 0),
            poisoned.clamp_min(0),
            F.hardtanh(poisoned),
            F.relu(poisoned),
        )
        h = ends.clamp(0, 1) + ends.clamp(min=-0.3) + torch.clamp(ends, max=0.2) + ends.clamp_max(1.0).clamp_min(0.0)
        h = h + ends.clamp(0.1, 0.4) + F.hardtanh(h, -0.5, 0.4) + F.relu6(h) + F.normalize(h, dim=-1)
        h = h + h**2 + h.square() + (h.abs() + 1) ** 0.5 + h / (h.norm(dim=-1, keepdim=True) + 1) + 3 / (h.exp() + 1)
        h = torch.addcmul(h, self.scale, h.sigmoid()) + h * self.scale + (h @ self.a.weight) * h.mean(-1, keepdim=True)
        return F.adaptive_avg_pool1d(h, 5).mean() + sum(one.nan_to_num() for one in bounded)


class Hidden(nn.Module):
    """Modules in plain lists, and methods kept as attributes, are those of the copy."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Dropout(0.5)
        self.steps, self.forward = [self.a, self.b], self.forward_all

    def forward_all(self, x):
        for one in self.steps:
            x = one(x)
        return F.gelu(x)


IMAGE = (4, 8, 16, 16)
PARTS = {
    "parametrised": (Parametrised, (4, 4, 8, 8)),
    "lazy buffer": (LazyBuffer, (30, 16)),
    "no_grad": (Detached, (30, 16)),
    "custom gradient": (CustomGradient, (30, 16)),
    "type asked": (TypeAsked, (30, 16)),
    "functions": (Functions, (40, 32)),
    "hidden": (Hidden, (30, 16)),
    "multihead": (Multihead, (4, 10, 32)),
    "timm": (timm_layers, IMAGE),
    "torchvision": (torchvision_layers, IMAGE),
    "activations": (activations, IMAGE),
    "pools": (pools, IMAGE),
    "other ranks": (other_ranks, (2, 8, 9, 10)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("training", [True, False])
def test_parts_keep_their_meaning(name, training):
    build, shape = PARTS[name]
    torch.manual_seed(0)
    model, x = build().train(training), torch.randn(shape)
    expected = step(copy.deepcopy(model), x)
    transformed = surgeon_fx.transform(model)
    state = copy.deepcopy(model.state_dict())
    assert_equal(step(transformed, x), expected)
    model.load_state_dict(state)
    surgeon_fx.ratios(transformed).fill(0.8)
    assert torch.equal(step(transformed, x)["output"], expected["output"])
    assert torch.isfinite(step(transformed, x[:2])["output"]).all()


def test_nested_inputs_and_outputs():
    model, x, y = Nested(), torch.randn(3, 16), torch.randn(3, 16)
    transformed = surgeon_fx.transform(model)
    assert torch.equal(transformed(x)["out"], model(x)["out"])
    assert torch.equal(transformed({"x": x}, y=y)["out"], model({"x": x}, y=y)["out"])
    assert torch.equal(transformed(x, flag=True)["out"][1][0], model(x, flag=True)["out"][1][0])


def test_hugging_face_transposed_linear():
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model, x = nn.Sequential(utils.Conv1D(32, 16)), torch.randn(4, 50, 16)
    transformed = surgeon_fx.transform(model)
    assert_equal(step(transformed, x), step(copy.deepcopy(model), x))
    surgeon_fx.ratios(transformed)["0"] = 0.9
    kept = retained_bytes(transformed(x), transformed)
    assert kept == kept_count(x.numel(), 0.9) * 4 + x.numel() // 8


def test_multihead_attention_prunes_what_goes_into_its_projections():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 50, 32)
    transformed = surgeon_fx.transform(model)
    exact = retained_bytes(transformed(x), transformed)
    surgeon_fx.ratios(transformed).fill(0.9)
    assert exact - retained_bytes(transformed(x), transformed) > 1.5 * x.nbytes  # the input, and the last projection's


def test_modules_in_plain_lists_follow_the_copy():
    model = Hidden()
    transformed = surgeon_fx.transform(model)
    assert transformed.steps[0] is transformed.a
    x = torch.randn(100, 16)
    surgeon_fx.ratios(transformed).fill(0.9)
    out = transformed(x)
    assert retained_bytes(out, transformed) < 0.6 * x.nbytes
    transformed.eval()
    assert torch.equal(transformed(x), transformed(x))
