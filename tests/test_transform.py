"""`transform`: exact at ratio 0, lighter in memory, and a drop-in for the model."""

import copy

import pytest
import torch
from model_cases import assert_equal, step
from torch import nn

import surgeon_fx
from surgeon_fx.kernels import compress, decompress, kept_count
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
