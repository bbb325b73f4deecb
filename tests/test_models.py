"""Whole networks: at ratio 0 output, loss and every gradient equal eager to the bit; with pruning, the output does."""

import copy

import pytest
import torch
from model_cases import assert_equal
from zoo_cases import SMALL_OPTIONS

import surgeon_fx
from surgeon_fx.retained import retained_bytes

# Name, input shape and options: full networks of the paper at small inputs, and one of each family with fewer blocks.
MODELS = {
    "wrn28_10": ((2, 3, 32, 32), {}),
    "resnext29": ((4, 3, 32, 32), {}),
    "resnet50": ((2, 3, 96, 96), {}),
    "deeplabv3plus_r50": ((2, 3, 97, 97), {}),
    "segformer_b5": ((1, 3, 96, 96), {}),
    "tv:resnet18": ((2, 3, 96, 96), {}),
    "timm:convnext_atto": ((2, 3, 96, 96), {"depths": (2, 2, 2, 2)}),
    "timm:efficientnet_b0": ((2, 3, 96, 96), {}),
    "timm:mobilenetv3_small_100": ((2, 3, 96, 96), {}),
    "timm:vit_tiny_patch16_224": ((2, 3, 224, 224), {"depth": 3}),  # DeiT's too
    "timm:swin_tiny_patch4_window7_224": ((1, 3, 224, 224), {"depths": (2, 2, 2, 2)}),
    "timm:maxvit_rmlp_pico_rw_256": ((1, 3, 256, 256), {"depths": (1, 1, 2, 1)}),
    "hf:segformer": ((1, 3, 64, 64), {}),
}
# What 0.9 leaves of eager's retained bytes. Attention keeps q, k, v and its output exact; a learnable bias, its maps.
HELD = {"wrn28_10": 0.18, "resnext29": 0.18, "resnet50": 0.18, "deeplabv3plus_r50": 0.18, "segformer_b5": 0.40}


def step(model, x):
    """Output, loss, the gradients of the input and of every parameter; and the bytes that backward kept alive."""
    model.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    out = model(x)
    held = retained_bytes(out, model)
    out = out if isinstance(out, torch.Tensor) else out.logits
    loss = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "loss": loss.detach(), "input": x.grad, **gradients}, held


@pytest.mark.filterwarnings("ignore")  # those of the libraries that build the models
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_and_held(name, training):
    """The paper's networks are whole in training; in evaluation, one block of each kind does."""
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape, options = MODELS[name]
    options = options if training else SMALL_OPTIONS.get(name, options)
    model, x = surgeon_fx.zoo.create(name, **options).train(training), torch.randn(shape)
    state = copy.deepcopy(model.state_dict())
    expected, eager = step(model, x)
    model.load_state_dict(state)  # statistics moved
    transformed = surgeon_fx.transform(model)
    actual, held = step(transformed, x)
    assert_equal(actual, expected)
    if name in HELD and training:
        assert held <= 1.03 * eager
    model.load_state_dict(state)
    surgeon_fx.ratios(transformed).fill(0.9)
    actual, held = step(transformed, x)
    assert torch.equal(actual["output"], expected["output"])
    assert all(value.isfinite().all() for value in actual.values())
    if name in HELD and training:
        assert held <= HELD[name] * eager
