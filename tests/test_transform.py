"""`transform`: exact at ratio 0, lighter in memory, and a drop-in for the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_cases import assert_equal, step
from torch import nn

import surgeon_fx
from surgeon_fx.kernels import kept_count
from surgeon_fx.retained import retained_bytes


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
        (nn.Conv2d(4, 6, 3, padding="same"), (8, 4, 20, 20)),
        (nn.Conv3d(4, 6, 3), (2, 4, 9, 9, 9)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 4, 70)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (4, 4, 17, 17)),
        (nn.ConvTranspose3d(4, 6, 2, groups=2), (2, 4, 9, 9, 9)),
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


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_prune_what_the_convolution_sees(mode):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode), torch.randn(4, 4, 20, 20)
    transformed = surgeon_fx.transform(nn.Sequential(layer))
    surgeon_fx.ratios(transformed)["0"] = 0.9
    actual = step(transformed, x)
    padded = pruned_by_hand(F.pad(x, (1, 1, 1, 1), mode), 0.9)
    g = 2 * actual["output"] / actual["output"].numel()
    (expected,) = torch.autograd.grad(F.conv2d(padded, layer.weight), layer.weight, g)
    torch.testing.assert_close(actual["0.weight"], expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape", "dims"),
    [
        (nn.BatchNorm1d(6), (8, 6, 60), (0, 2)),
        (nn.BatchNorm2d(6), (8, 6, 12, 12), (0, 2, 3)),
        (nn.BatchNorm3d(6), (4, 6, 6, 6, 6), (0, 2, 3, 4)),
        (nn.BatchNorm2d(6, affine=False), (8, 6, 12, 12), (0, 2, 3)),
        (nn.SyncBatchNorm(6), (8, 6, 12, 12), (0, 2, 3)),
        (nn.LayerNorm(48), (16, 10, 48), (2,)),
        (nn.LayerNorm(48, elementwise_affine=False), (16, 10, 48), (2,)),
        (nn.LayerNorm((10, 48), bias=False), (16, 10, 48), (1, 2)),
        (nn.InstanceNorm2d(6, affine=True), (8, 6, 12, 12), (2, 3)),
        (nn.InstanceNorm2d(6), (1, 6, 24, 24), (2, 3)),
        (nn.GroupNorm(3, 6), (8, 6, 12, 12), (2, 3, 4)),
    ],
)
def test_norm_gradients_are_those_of_the_pruned_normalised_input(layer, shape, dims, frozen):
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).requires_grad_(not frozen)
    if layer.weight is not None:
        nn.init.uniform_(layer.weight)
    x = torch.randn(shape) * 3 + 2
    transformed = surgeon_fx.transform(nn.Sequential(layer))
    surgeon_fx.ratios(transformed)["0"] = 0.8
    actual = step(transformed, x)

    def grouped(t):
        return t.view(shape[0], layer.num_groups, -1, *shape[2:]) if isinstance(layer, nn.GroupNorm) else t

    variance, mean = torch.var_mean(grouped(x), dims, correction=0, keepdim=True)
    std = (variance + layer.eps).sqrt()
    hat = pruned_by_hand((grouped(x) - mean) / std, 0.8)
    g = 2 * actual["output"] / actual["output"].numel()
    weight = layer.weight.detach() if layer.weight is not None else torch.ones(())
    if not isinstance(layer, nn.LayerNorm):
        weight = weight.view(-1, *[1] * (x.dim() - 2))
    others = [d for d in range(x.dim()) if weight.expand(shape).stride(d) == 0]
    if layer.weight is not None and not frozen:
        torch.testing.assert_close(actual["0.weight"].flatten(), (g * hat.view(shape)).sum(others).flatten())
    if getattr(layer, "bias", None) is not None and not frozen:
        torch.testing.assert_close(actual["0.bias"].flatten(), g.sum(others).flatten())
    gw = grouped(g * weight)
    expected = (gw - gw.mean(dims, keepdim=True) - hat * (gw * hat).mean(dims, keepdim=True)) / std
    torch.testing.assert_close(grouped(actual["input"]), expected, atol=1e-7, rtol=1e-3)


def test_running_statistics_give_an_exact_input_gradient():
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(6).eval()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    x = torch.randn(8, 6, 12, 12) * 3 + 2
    expected = step(nn.Sequential(copy.deepcopy(layer)), x)
    transformed = surgeon_fx.transform(nn.Sequential(layer))
    surgeon_fx.ratios(transformed)["0"] = 0.8
    actual = step(transformed, x)
    view = (1, -1, 1, 1)
    std = (layer.running_var + layer.eps).sqrt().view(view)
    hat = pruned_by_hand((x - layer.running_mean.view(view)) / std, 0.8)
    g = 2 * actual["output"] / actual["output"].numel()
    torch.testing.assert_close(actual["0.weight"], (g * hat).sum((0, 2, 3)))
    torch.testing.assert_close(actual["0.bias"], expected["0.bias"])
    torch.testing.assert_close(actual["input"], expected["input"])


def test_rms_norm():
    torch.manual_seed(0)
    layer, x = nn.RMSNorm(64, eps=1e-5), torch.randn(50, 64) * 3
    transformed = surgeon_fx.transform(nn.Sequential(layer))
    surgeon_fx.ratios(transformed)["0"] = 0.8
    actual = step(transformed, x)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    g = 2 * actual["output"] / actual["output"].numel()
    hat = pruned_by_hand(x * rstd, 0.8)
    torch.testing.assert_close(actual["0.weight"], (g * hat).sum(0))
    torch.testing.assert_close(actual["input"], rstd * (g - hat * (g * hat).mean(-1, keepdim=True)))


def test_smooth_activations_and_gates_are_exact_where_they_are_kept():
    torch.manual_seed(0)

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x):
            return F.gelu(self.a(x)) * x

    x, model = torch.randn(80, 64), Gate()
    h = model.a(x).detach()
    transformed = surgeon_fx.transform(model)
    surgeon_fx.ratios(transformed)["a"] = 0.7
    actual = step(transformed, x)
    g = 2 * actual["output"] / actual["output"].numel()
    kept = pruned_by_hand(h, 0.7).requires_grad_()
    (dh,) = torch.autograd.grad(F.gelu(kept), kept, g * pruned_by_hand(x, 0.7))
    torch.testing.assert_close(actual["a.bias"], dh.sum(0))
    torch.testing.assert_close(actual["a.weight"], dh.T @ pruned_by_hand(x, 0.7))


def test_memory_goes_away():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
    model, x = surgeon_fx.transform(block), torch.randn(16, 8, 32, 32)
    dense = x.nbytes
    out = model(x)
    bits, statistics = dense // 32, 8 * 4
    # x, the norm's input, the second conv's input
    assert retained_bytes(out, model) == 3 * dense + bits + 2 * statistics  # mean and deviation
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
