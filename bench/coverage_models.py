"""The models of `bench/coverage.py`: one of each timm family, torchvision's, and small Hugging Face ones.

Each is built small, with random weights and inputs that it accepts in training mode.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from common import RESULTS
from torch import Tensor, nn
from tqdm import tqdm

BIG = 150_000_000  # parameters
SLOW_TIMM = ("convmixer_768_32",)  # for their size
QUICK: dict[str, tuple[str, ...]] = {
    "timm": (
        *("test_byobnet", "test_convnext", "test_efficientnet", "test_mambaout", "test_nfnet", "test_vit"),
        *("efficientvit_m0", "gmlp_ti16_224", "levit_128s", "mobilevit_xxs", "pvt_v2_b0", "test_resnet"),
    ),
    "torchvision": (
        *("densenet121", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"),
        *("lraspp_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"),
        *("r3d_18", "swin3d_t", "raft_small"),
    ),
    "transformers": ("segformer", "vit", "swin", "bert", "gpt2", "llama", "whisper", "clip", "mamba", "t5"),
}


class Built(NamedTuple):
    """A model, and what one call is given. Input gradients are compared for floats among `inputs`."""

    model: nn.Module
    inputs: tuple[Any, ...]
    options: dict[str, Any]


class Case(NamedTuple):
    suite: str
    name: str
    build: Callable[[], Built]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries' own warnings are not what is looked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def timm_cases() -> Iterator[Case]:
    for name in timm_families().values():
        yield Case("timm", name, partial(build_timm, name))


def timm_families() -> dict[str, str]:
    """The smallest model of each family. Looked for once a version of timm: it takes minutes."""
    import timm

    cache = RESULTS / "timm_families.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    if timm.__version__ not in known:
        sizes: dict[str, tuple[int, str]] = {}
        families = [(family, name) for family in timm.list_modules() for name in timm.list_models(module=family)]
        for family, name in tqdm(families, desc="sizes of timm's models, once", file=sys.stderr, disable=None):
            with torch.device("meta"), quiet(), contextlib.suppress(Exception):  # some cannot be built there
                size = sum(p.numel() for p in timm.create_model(name).parameters())
                sizes[family] = min(sizes.get(family, (size, name)), (size, name), key=lambda found: found[0])
        cache.parent.mkdir(parents=True, exist_ok=True)
        known[timm.__version__] = {family: name for family, (_, name) in sizes.items()}
        cache.write_text(json.dumps(known, indent=1) + "\n")
    return known[timm.__version__]


def build_timm(name: str) -> Built:
    """At the size the model is made for, or a smaller one where that is large and not the only one."""
    import timm

    model = timm.create_model(name)
    size = timm.data.resolve_model_data_config(model)["input_size"]
    if name in SLOW_TIMM or (size[-1] > 299 and not model.pretrained_cfg.get("fixed_input_size")):
        size = model.pretrained_cfg.get("min_input_size") or (3, 160, 160)
    return Built(model, (torch.randn(2, *size),), {})


def torchvision_cases() -> Iterator[Case]:
    from torchvision import models

    for task, build in (
        (models, build_classifier),
        (models.segmentation, build_segmentation),
        (models.detection, build_detector),
        (models.video, build_video),
        (models.optical_flow, build_flow),
    ):
        for name in models.list_models(module=task):
            yield Case("torchvision", name, partial(build, name))


def torchvision_model(name: str, **options: Any) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, **options)


def build_classifier(name: str) -> Built:
    options: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    size = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 112}.get(name, 128)
    if name.startswith("vit"):
        options["image_size"] = size
    model = torchvision_model(name, **options)
    if size == 128 and not name.startswith("vit") and sum(p.numel() for p in model.parameters()) > BIG:
        size = 64
    return Built(model, (torch.randn(2, 3, size, size),), {})


def build_segmentation(name: str) -> Built:
    return Built(torchvision_model(name, weights_backbone=None, aux_loss=None), (torch.randn(2, 3, 128, 128),), {})


def build_detector(name: str) -> Built:
    sizes = {} if name.startswith("ssd") else {"min_size": 160, "max_size": 224}
    boxes = torch.tensor([[8.0, 8.0, 90.0, 100.0], [30.0, 40.0, 120.0, 150.0]])
    masks = torch.zeros(2, 160, 160, dtype=torch.uint8)
    masks[:, 45:90, 45:80] = 1
    keypoints = torch.cat([torch.rand(2, 17, 2) * 40 + 45, torch.ones(2, 17, 1)], -1)
    target = {"boxes": boxes, "labels": torch.ones(2, dtype=torch.long), "masks": masks, "keypoints": keypoints}
    model = torchvision_model(name, weights_backbone=None, **sizes)
    return Built(model, ([torch.rand(3, 160, 160) for _ in range(2)],), {"targets": [dict(target) for _ in range(2)]})


def build_video(name: str) -> Built:
    shape = (1, 3, 16, 224, 224) if name.startswith(("mvit", "s3d")) else (2, 3, 8, 112, 112)
    return Built(torchvision_model(name), (torch.randn(shape),), {})


def build_flow(name: str) -> Built:
    images = torch.rand(2, 3, 128, 128), torch.rand(2, 3, 128, 128)
    return Built(torchvision_model(name), images, {"num_flow_updates": 3})


def transformers_cases() -> Iterator[Case]:
    if importlib.util.find_spec("transformers") is None:
        print("the transformers suite is skipped: pip install transformers", file=sys.stderr)
        return
    tokens, image, vocabulary = torch.arange(128).view(2, 64) % 100, (2, 3, 128, 128), {"vocab_size": 100}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text, vision = {**vocabulary, **sizes}, {"image_size": 128, **sizes}
    mixture = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    halves = {f"{half}_{key}": n for half in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 128))}
    whisper = {
        **halves,
        "d_model": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_source_positions": 200,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    clip = {"text_config": {**text, **special}, "vision_config": {"patch_size": 16, **vision}, "projection_dim": 32}
    sound = torch.arange(16000.0).mul_(0.05).sin_().view(2, 8000)  # no input gradient: the model sets the flag itself
    no_cache, decoder = {"use_cache": False}, {"decoder_input_ids": tokens, "use_cache": False}
    for name, head, settings, inputs, options in (
        ("segformer", "SegformerForSemanticSegmentation", {}, (image,), {}),
        ("vit", "ViTForImageClassification", vision, (image,), {}),
        ("dinov2", "Dinov2ForImageClassification", {"patch_size": 16, **vision}, (image,), {}),
        ("swin", "SwinForImageClassification", {"image_size": 128, "window_size": 4}, (image,), {}),
        ("convnextv2", "ConvNextV2ForImageClassification", {}, (image,), {}),
        ("bert", "BertForSequenceClassification", text, (tokens,), {}),
        ("gpt2", "GPT2LMHeadModel", {**vocabulary, "n_embd": 64, "n_layer": 2, "n_head": 4}, (tokens,), no_cache),
        ("llama", "LlamaForCausalLM", text, (tokens,), no_cache),
        ("mixtral", "MixtralForCausalLM", {**text, **mixture}, (tokens,), no_cache),
        ("mamba", "MambaForCausalLM", {**vocabulary, "hidden_size": 64, "num_hidden_layers": 2}, (tokens,), no_cache),
        ("t5", "T5ForConditionalGeneration", {**vocabulary, **t5}, (tokens,), decoder),
        ("whisper", "WhisperForConditionalGeneration", {**vocabulary, **whisper, **special}, ((2, 80, 400),), decoder),
        ("clip", "CLIPModel", clip, (tokens, image), {}),
        ("wav2vec2", "Wav2Vec2ForCTC", {"vocab_size": 32, **sizes}, (), {"input_values": sound}),
    ):
        yield Case("transformers", name, partial(build_hugging_face, head, settings, inputs, options))


def build_hugging_face(head: str, settings: dict[str, Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Built:
    import transformers

    kind = getattr(transformers, head)
    given = tuple(x if isinstance(x, Tensor) else torch.randn(x) for x in inputs)
    return Built(kind(kind.config_class(**settings)), given, options)


SUITES = {"timm": timm_cases, "torchvision": torchvision_cases, "transformers": transformers_cases}


def quick_models(*suites: str) -> list[Case]:
    """A fast subset of the suites named, or of all of them; timm's without the search for each family's smallest."""
    timm = [Case("timm", name, partial(build_timm, name)) for name in QUICK["timm"]]
    found = [case for suite in suites or SUITES for case in (timm if suite == "timm" else SUITES[suite]())]
    return [case for case in found if case.name in QUICK[case.suite]]


def find_case(suite: str, name: str) -> Case:
    """The model of that name; timm's without the search."""
    if suite == "timm":
        return Case(suite, name, partial(build_timm, name))
    return next(case for case in SUITES[suite]() if case.name == name)
