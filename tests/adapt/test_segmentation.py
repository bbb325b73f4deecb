"""Maps of class scores: tensors, dicts, and what Hugging Face models return."""

import copy

import pytest
import torch
import torch.nn.functional as F
from adapt_cases import Pixels
from torch import nn

import surgeon_fx
from surgeon_fx import adapt
from surgeon_fx.retained import retained_bytes

METHODS = ["tent", "eata", "sar", "cotta", "full", "static", "surgeon", "surgeon_norm_eata", "surgeon_css"]


@pytest.fixture(scope="module")
def hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1] * 4,
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1] * 4,
        decoder_hidden_size=8,
        num_labels=5,
    )
    return transformers.SegformerForSemanticSegmentation(config)


@pytest.mark.parametrize("name", METHODS)
def test_hugging_face_objects(name, hugging_face):
    model = copy.deepcopy(hugging_face)
    options = {"lr": 1e-2, **({"train": "norm", "floor": 0.0} if name == "sar" else {})}
    if name in ("eata", "sar"):
        options["margin"] = 0.999
    if name == "surgeon_norm_eata":
        options["loss"] = adapt.EataLoss(margin=0.999)
    adapter = adapt.METHODS[name](model, **options)
    before = copy.deepcopy(model.state_dict())
    x = torch.rand(2, 3, 64, 64)
    for batch in (x, {"pixel_values": x}):
        if name == "cotta" and isinstance(batch, dict):
            with pytest.raises(ValueError, match="N x C x H x W"):
                adapter(batch)
            continue
        out = adapter(batch)
        assert type(out).__name__ == "SemanticSegmenterOutput"
        assert out.logits.shape == (2, 5, 16, 16)
        assert not out.logits.requires_grad
    if name != "surgeon_css":  # that chooses no pixel of so unsure a network
        changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
        assert changed
        assert changed <= set(adapter.trained)


def test_a_step_on_pixels_is_that_of_plain_torch():
    """Three steps of EATA's loss over pixels, eager and on a transformed model that prunes nothing."""
    torch.manual_seed(0)
    reference = Pixels().double()
    models = [copy.deepcopy(reference) for _ in range(2)]
    own = [p for name, p in reference.named_parameters() if name.startswith("body.1.")]
    optimizer = torch.optim.Adam(own, lr=1e-2)
    stream = torch.rand(3, 2, 3, 8, 8, dtype=torch.float64) * 3
    margin, mean, counts = 0.97 * torch.log(torch.tensor(4.0)).item(), None, []
    for x in stream:
        probabilities = F.softmax(reference(x)["out"], 1).permute(0, 2, 3, 1).reshape(-1, 4)
        entropy = -(probabilities * probabilities.log()).sum(1)
        keep = (entropy < margin).detach()
        if mean is not None:
            keep &= F.cosine_similarity(mean[None], probabilities.detach(), dim=1).abs() < 0.99
        counts.append(int(keep.sum()))
        now = probabilities[keep].detach().mean(0)
        mean = now if mean is None else 0.9 * mean + 0.1 * now
        optimizer.zero_grad()
        (entropy[keep] * (margin - entropy[keep].detach()).exp()).mean().backward()
        optimizer.step()
    assert all(0 < count < 128 for count in counts)
    options = {"margin": 0.97, "d": 0.99}
    adapters = [
        adapt.EATA(models[0], lr=1e-2, **options),
        adapt.StaticSparsity(models[1], loss=adapt.EataLoss(**options), ratio=0.0, train="norm", lr=1e-2),
    ]
    for adapter, model in zip(adapters, models, strict=True):
        for x, count in zip(stream, counts, strict=True):
            adapter(x)
            assert adapter.last.selected == count
        for name, parameter in reference.named_parameters():
            assert torch.allclose(dict(model.named_parameters())[name], parameter), name


def test_the_small_segformer_adapts_in_less_memory():
    def held(method):
        torch.manual_seed(0)
        adapter = method(surgeon_fx.zoo.create("segformer_camvid"))
        found = []
        adapter.model.register_forward_hook(lambda m, args, out: found.append(retained_bytes(out, m)))
        out = adapter(torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)))
        assert out.shape == (1, 11, 16, 24)
        return max(found)

    full = held(adapt.FullTuning)
    assert held(adapt.StaticSparsity) < 0.5 * full
    assert held(adapt.Surgeon) < full


def test_pixels_of_the_segformer_are_normalised_inside():
    model = surgeon_fx.zoo.create("segformer_camvid")
    assert surgeon_fx.zoo.entry("segformer_camvid").mean is None
    assert [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)] == [
        "model.decode_head.linear_fuse.bn"
    ]
    assert model.normalize.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
