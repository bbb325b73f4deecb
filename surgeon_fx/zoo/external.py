"""Models of other packages by name. Each package is imported when one of its names is asked for, never before."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

TORCHVISION_SIZES = {"inception_v3": 299}
TORCHVISION_OPTIONS = {name: {"init_weights": True} for name in ("googlenet", "inception_v3")}  # else they warn

# Which Hugging Face head a model type gets: the first of these that it has, unless its type has a row of its own.
TASKS = {
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
    "UniversalSegmentation": "UNIVERSAL_SEGMENTATION",
    "ObjectDetection": "OBJECT_DETECTION",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
    "CausalLM": "CAUSAL_LM",
}
TASK_OF_TYPE = {"segformer": "SemanticSegmentation"}


class Source(NamedTuple):
    """How to build a model of one package, and the input it expects: one sample."""

    create: Callable[..., nn.Module]
    input_shape: Callable[[str], tuple[int, ...]]


def require(package: str) -> ModuleType:
    """The package, or an ImportError that says what to install."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        top = package.partition(".")[0]
        if error.name != top:
            raise
        raise ImportError(f"this model or file needs {top}: pip install {top}", name=top) from error


def unknown(name: str, known: Iterable[str], more: str = "") -> ValueError:
    """The error for a name nobody has, with the nearest ones there are."""
    near = difflib.get_close_matches(name, list(known), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return ValueError(f"no model is called {name!r}{hint}{more}")


def create_timm(name: str, **options: Any) -> nn.Module:
    timm = require("timm")
    if not timm.is_model(name):
        raise unknown(name, timm.list_models())
    return timm.create_model(name, **options)


def timm_input_shape(name: str) -> tuple[int, ...]:
    timm = require("timm")
    if not timm.is_model(name):
        raise unknown(name, timm.list_models())
    config = timm.get_pretrained_cfg(name)
    return (1, *timm.data.resolve_data_config(pretrained_cfg=config.to_dict() if config else {})["input_size"])


def _torchvision_builder(name: str) -> Callable[..., nn.Module]:
    models = require("torchvision").models
    if name not in models.list_models():
        raise unknown(name, models.list_models())
    return models.get_model_builder(name)


def create_torchvision(name: str, **options: Any) -> nn.Module:
    """Random weights unless options ask for others; a backbone is not downloaded behind the user's back either."""
    builder = _torchvision_builder(name)
    accepted = inspect.signature(builder).parameters
    defaults: dict[str, Any] = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    return builder(**{**defaults, **TORCHVISION_OPTIONS.get(name, {}), **options})


def torchvision_input_shape(name: str) -> tuple[int, ...]:
    if ".video." in _torchvision_builder(name).__module__:
        return (1, 3, 16, 224, 224) if name.startswith(("mvit", "swin")) else (1, 3, 16, 112, 112)
    size = TORCHVISION_SIZES.get(name, 224)
    return (1, 3, size, size)


def _hugging_face_config(name: str, **options: Any) -> Any:
    configs = require("transformers").CONFIG_MAPPING
    if name not in configs:
        raise unknown(name, configs.keys())
    return configs[name](**options)


def create_hugging_face(name: str, task: str | None = None, **options: Any) -> nn.Module:
    """A model type with random weights; options go to its config, `task` names another head ("ImageClassification")."""
    config, transformers = _hugging_face_config(name, **options), require("transformers")
    heads = (head for head, key in TASKS.items() if type(config) in getattr(transformers, f"MODEL_FOR_{key}_MAPPING"))
    task = task or TASK_OF_TYPE.get(name) or next(heads, None)
    return getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel").from_config(config)


def hugging_face_input_shape(name: str) -> tuple[int, ...]:
    config = _hugging_face_config(name)
    config = getattr(config, "vision_config", None) or config
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    if channels is None and size is None:
        raise ValueError(
            f"the default config of {name!r} has no image size: give the shape of an input, as --shape 8x128 does "
            "(the page of --serve plans models of images)"
        )
    size = size or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return (1, channels or 3, height, width)


SOURCES = {
    "timm": Source(create_timm, timm_input_shape),
    "tv": Source(create_torchvision, torchvision_input_shape),
    "hf": Source(create_hugging_face, hugging_face_input_shape),
}
