"""One save for norm -> activation -> layer: what is kept, and gradients against the chain written out."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import pruned_by_hand, pruned_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import surgeon_fx
from surgeon_fx.retained import nodes, retained_bytes

CHANNELS = 12
IMAGES, TOKENS = (4, CHANNELS, 9, 11), (3, 200, CHANNELS)


class Chain(nn.Module):
    """norm -> activation -> layers that read the same."""

    def __init__(self, norm, activation, *layers):
        super().__init__()
        self.norm, self.activation, self.layers = norm, activation, nn.ModuleList(layers)

    def forward(self, x):
        x = self.activation(self.norm(x))
        return [layer(x) for layer in self.layers]


def conv(**options):
    return nn.Conv2d(CHANNELS, 10, 3, padding=1, **options)


def linear():
    return nn.Linear(CHANNELS, 10)


class Patches(nn.Module):
    """A convolution over tokens, as SegFormer shrinks its keys."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, 10, 2, stride=2)

    def forward(self, x):
        return self.conv(x.permute(0, 2, 1).reshape(x.shape[0], CHANNELS, 10, 20))


def layer_norm():
    return nn.LayerNorm(CHANNELS)


CHAINS = {
    "batch norm, relu, conv": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.ReLU(), conv()), IMAGES),
    "in place": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True), conv()), IMAGES),
    "two layers": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.ReLU(), conv(), conv(stride=2)), IMAGES),
    "norm, conv": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.Identity(), conv()), IMAGES),
    "without weights": (lambda: Chain(nn.BatchNorm2d(CHANNELS, affine=False), nn.ReLU(inplace=True), conv()), IMAGES),
    "leaky": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.LeakyReLU(0.2), conv()), IMAGES),
    "relu6": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.ReLU6(), conv()), IMAGES),
    "smooth": (lambda: Chain(nn.BatchNorm2d(CHANNELS), nn.SiLU(), conv()), IMAGES),
    "group norm": (lambda: Chain(nn.GroupNorm(3, CHANNELS), nn.Hardswish(), conv()), IMAGES),
    "layer norm, q, k, v": (lambda: Chain(layer_norm(), nn.Identity(), linear(), linear(), linear()), TOKENS),
    "layer norm, gelu": (lambda: Chain(layer_norm(), nn.GELU(), linear()), TOKENS),
    "no bias": (lambda: Chain(nn.LayerNorm(CHANNELS, bias=False), nn.GELU(approximate="tanh"), linear()), TOKENS),
    "rms norm": (lambda: Chain(nn.RMSNorm(CHANNELS), nn.Identity(), linear()), TOKENS),
    "other views": (lambda: Chain(layer_norm(), nn.Identity(), linear(), Patches()), TOKENS),
}


def build(name):
    torch.manual_seed(0)
    model, shape = CHAINS[name][0](), CHAINS[name][1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, torch.randn(shape)


def shared(model, ratio=0.8, **options):
    result = surgeon_fx.transform(model, surgeon_fx.Config(share_saves=True, **options))
    surgeon_fx.ratios(result).fill(ratio)
    return result


def step(model, x):
    """Outputs and gradients, of the input as "x"."""
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = model(x)
    gradients = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(gradients, outputs, strict=True)])
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [y.detach() for y in outputs], {"x": x.grad, **found}, gradients


def rebuilt_by_hand(model, x, ratio):
    """What the layers read: the affine of x-hat and the activation at the places the norm keeps, zero elsewhere."""
    norm = model.norm
    plain = norm(x).detach()
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    view = (1, -1, 1, 1) if x.dim() == 4 else (1, 1, -1)
    hat = plain if bias is None else plain - bias.detach().view(view)
    hat = hat if weight is None else hat / weight.detach().view(view)
    keep = pruned_by_hand(hat, ratio) != 0
    return torch.where(keep, model.activation(plain.clone()), 0.0)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_and_bytes(name, training, layout):
    model, x = build(name)
    if layout == "channels last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    model.train(training)
    ratio = 0.8
    for module in model.modules():  # so that running statistics do not move between the runs
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            if not training and module.affine:
                module.running_mean.uniform_(-0.3, 0.3)
    expected_outputs, eager, _ = step(model, x)
    apart = surgeon_fx.transform(model)
    surgeon_fx.ratios(apart).fill(ratio)
    _, separate, _ = step(apart, x)
    together = shared(model, ratio)
    outputs, found, gradients = step(together, x)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
    smooth = not isinstance(model.activation, (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Identity))
    unaffected = [n for n in found if not n.endswith("weight") or n == "norm.weight"]
    for one in unaffected if not smooth else [n for n in found if n.startswith("layers") and n.endswith("bias")]:
        torch.testing.assert_close(found[one], separate[one])
    inputs = rebuilt_by_hand(model, x, ratio)
    trains = training or getattr(model.norm, "weight", None) is not None
    if trains or not isinstance(model.norm, nn.BatchNorm2d):
        for i, layer in enumerate(model.layers):
            weights = [p for n, p in layer.named_parameters() if n.endswith("weight")]
            (expected,) = torch.autograd.grad(layer(inputs), weights, gradients[i])
            [actual] = [found[n] for n in found if n.startswith(f"layers.{i}.") and n.endswith("weight")]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert (actual - eager[f"layers.{i}.{'conv.' if isinstance(layer, Patches) else ''}weight"]).norm() > 0
        held = retained_bytes(together(x.clone(memory_format=torch.preserve_format).requires_grad_()), together)
        bits = (x.numel() + 7) // 8 if isinstance(model.activation, (nn.ReLU, nn.ReLU6, nn.LeakyReLU)) else 0
        statistics = held - pruned_bytes(x, ratio) - bits
        assert 0 <= statistics <= 2 * 4 * max(CHANNELS, x.numel() // CHANNELS)


@pytest.mark.parametrize("norm", [nn.RMSNorm(CHANNELS), nn.LayerNorm(CHANNELS), nn.LayerNorm((200, CHANNELS))], ids=str)
def test_other_strides(norm):
    torch.manual_seed(0)
    model, x = Chain(norm, nn.Identity(), linear()), torch.randn(3, CHANNELS, 200).transpose(1, 2)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn_like(parameter))
    _, found, gradients = step(shared(model), x)
    if isinstance(norm, nn.RMSNorm):  # its x-hat lies in memory as x does, its output does not: each keeps its own
        keep = pruned_by_hand(norm(x), 0.8) != 0
    else:
        keep = pruned_by_hand((norm(x) - norm.bias) / norm.weight, 0.8) != 0
    expected = gradients[0].view(-1, 10).t() @ torch.where(keep, norm(x), 0.0).reshape(-1, CHANNELS)
    torch.testing.assert_close(found["layers.0.weight"], expected.detach(), rtol=1e-4, atol=1e-4)


def test_smooth_activation_serves_the_next_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Dropout(0.0), nn.Linear(40, 10))
    x, ratio = torch.randn(30, 12), 0.7
    together = shared(model, ratio)
    output = together(x)
    before = model[0](x).detach()
    pruned = pruned_by_hand(before, ratio)
    inputs = torch.where(pruned != 0, F.gelu(before), 0.0)
    g = torch.randn_like(output)
    found = torch.autograd.grad(output, [model[3].weight, model[0].bias], g, retain_graph=True)
    torch.testing.assert_close(found[0], g.t() @ inputs)
    torch.testing.assert_close(found[1], torch.ops.aten.gelu_backward(g @ model[3].weight, pruned).sum(0))
    assert retained_bytes(output, together, ()) == pruned_bytes(before, ratio) + x.nbytes


@pytest.mark.parametrize(
    ("norm", "layer", "kept"),
    [(0.9, 0.5, 0.5), (0.5, 0.9, 0.5), (0.9, 0.0, None), (0.0, 0.9, None), (1.0, 1.0, 1.0)],
)
def test_the_lowest_ratio_of_those_that_prune_counts(norm, layer, kept):
    model, x = build("norm, conv")
    together = shared(model)
    surgeon_fx.ratios(together).update({"norm": norm, "layers.0": layer})
    held = retained_bytes(together(x), together)
    assert held == surgeon_fx.plan(together, x).saved_bytes
    _, found, _ = step(together, x)
    _, eager, _ = step(model, x)
    if kept is not None:
        assert abs(held - pruned_bytes(x, kept) * (kept < 1)) <= 8 * CHANNELS
        assert (found["layers.0.weight"].norm() == 0) == (kept == 1)
    if layer == 0:
        assert torch.equal(found["layers.0.weight"], eager["layers.0.weight"])


@pytest.mark.parametrize("name", CHAINS)
def test_exact_at_ratio_0(name):
    model, x = build(name)
    outputs, eager, _ = step(model, x)
    again, found, _ = step(shared(model, 0.0), x)
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    assert all(torch.equal(found[one], eager[one]) for one in eager)


def test_explained():
    model, x = build("batch norm, relu, conv")
    together = shared(model)
    found = surgeon_fx.explain(together, x)
    reasons = {row.reason for row in found.rows}
    assert {"serves layers.0 too", "rebuilt from what norm keeps"} <= reasons
    assert sum(row.held_bytes for row in found.rows) == retained_bytes(together(x), together)
    (graph,) = found.graphs
    savings = {n.meta["saving"].rule: n.meta["saving"] for n in graph.graph.nodes if "saving" in n.meta}
    assert savings["norm"].sharers == ("layers.0",)
    assert savings["conv"].source == "norm"


def test_a_weight_that_changed_is_noticed():
    model, x = build("batch norm, relu, conv")
    output = shared(model)(x)[0]
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), model.layers[0].weight)


def test_packed_is_what_is_restored():
    model, x = build("batch norm, relu, conv")
    output = shared(model)(x)[0]
    node = next(one for one in nodes(output) if one.name() == "ConvolutionBackward")
    with torch.no_grad():
        (kept,), (*saved, _) = node.kept, node.saved_tensors
        values, bitmask = kept.packed(*saved)
        dense = surgeon_fx.kernels.decompress(
            surgeon_fx.kernels.Compressed(values, bitmask, tuple(x.shape), kept.restored_stride)
        )
        assert torch.equal(dense, kept.restore(*saved))
    assert values.numel() == surgeon_fx.kernels.kept_count(x.numel(), 0.8)


class Apart(nn.Module):
    """Chains that are none: something else happens to the norm's output, or before the layer."""

    def __init__(self, how):
        super().__init__()
        self.norm, self.conv, self.how = nn.BatchNorm2d(CHANNELS), conv(), how

    def forward(self, x):
        return [self.conv(self.how(self.norm(x)))]


@pytest.mark.parametrize(
    "how",
    [
        lambda x: (x + 1).relu(),
        lambda x: x.roll(1, 2),
        lambda x: x.transpose(2, 3).contiguous(),
        lambda x: x.add_(1),
        lambda x: F.dropout(x, 0.5, True),
        lambda x: x[:, :, 1:],
    ],
    ids=["sum", "roll", "transposed", "in place", "dropout", "part"],
)
def test_what_is_no_chain_keeps_its_own(how):
    torch.manual_seed(0)
    model, x = Apart(how), torch.randn(4, CHANNELS, 9, 9)
    apart = surgeon_fx.transform(model)
    surgeon_fx.ratios(apart).fill(0.8)
    torch.manual_seed(1)
    _, expected, _ = step(apart, x)
    together = shared(model)
    torch.manual_seed(1)
    _, found, _ = step(together, x)
    assert all(torch.equal(found[one], expected[one]) for one in expected)


def test_frozen_layers_do_not_count():
    model, x = build("batch norm, relu, conv")
    model.layers[0].weight.requires_grad_(False)
    together = shared(model)
    surgeon_fx.ratios(together)["layers.0"] = 0.1
    held = retained_bytes(together(x), together)
    assert held <= pruned_bytes(x, 0.8) + (x.numel() + 7) // 8 + 8 * CHANNELS


def test_composes_with_autocast_and_hooks():
    model, x = build("layer norm, q, k, v")
    together, apart = shared(model), surgeon_fx.transform(model)
    surgeon_fx.ratios(apart).fill(0.8)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, found, gradients = step(together, x)
        held = retained_bytes(together(x), together)
    assert outputs[0].dtype is torch.bfloat16
    inputs = rebuilt_by_hand(model, x, 0.8).view(-1, CHANNELS)
    expected = gradients[0].view(-1, 10).t() @ inputs
    torch.testing.assert_close(found["layers.0.weight"], expected, rtol=0.05, atol=0.1)
    assert held < retained_bytes(apart(x), apart)
    with torch.autograd.graph.save_on_cpu():
        outputs = together(x)
    moved = torch.autograd.grad(outputs[0].sum(), model.layers[0].bias)
    torch.testing.assert_close(moved[0], torch.full((10,), 600.0))
    again = step(Checkpointed(together), x)[1]
    for name, value in step(Checkpointed(apart), x)[1].items():
        torch.testing.assert_close(again[name], value)


class Checkpointed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)
