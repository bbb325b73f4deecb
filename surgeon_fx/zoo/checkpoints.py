"""Loading public checkpoints: the zoo's layers carry their names, so what is left to do is to unwrap and to compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgeon_fx.zoo.external import require
from surgeon_fx.zoo.registry import create

BUNDLES = ("state_dict", "model_state_dict", "model", "net")  # keys a training script files its state dict under
WRAPPERS = ("module.", "model.", "_orig_mod.", "1.")  # DataParallel, a normaliser in front, torch.compile
NORMALISERS = ("", "0", "normalize", "normalizer")
CONSTANTS = {"mean": "mean", "mu": "mean", "std": "std", "sigma": "std"}
TRAINING_ONLY = ("dsn.",)  # heads that a model without them may leave in the file


def load(model: nn.Module | str, source: str | Path | Mapping[str, Any]) -> nn.Module:
    """Loads a checkpoint file or a state dict into a model, or into a new one if a name is given. Returns the model.

    Every parameter must be found and every key of the file used; wrappers' prefixes are stripped first. Normalisation
    constants are taken from the file where it has them.
    """
    model = create(model) if isinstance(model, str) else model
    own = model.state_dict()
    state = _rename(own, _unwrap(source if isinstance(source, Mapping) else _read(Path(source))))
    missing = [key for key in own if key not in state and not _may_be_missing(key)]
    unexpected = [key for key in state if key not in own]
    shapes = {key: (tuple(state[key].shape), tuple(own[key].shape)) for key in own if key in state}
    differing = [f"{key} {found} instead of {wanted}" for key, (found, wanted) in shapes.items() if found != wanted]
    problems = [_first(missing, "missing"), _first(unexpected, "unexpected"), _first(differing, "of another shape")]
    if any(problems):
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: {'; '.join(filter(None, problems))}")
    model.load_state_dict({**own, **state})
    return model


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return require("safetensors.torch").load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ImportError):
        raise
    except Exception as error:  # pickle, zipfile, torch and safetensors each have errors of their own for junk
        raise ValueError(
            f"{path} is no checkpoint of tensors and plain values (a web page saved instead of the file, or Python "
            "objects inside?); download it again, or load it where you trust it and save its state dict alone"
        ) from error


def _unwrap(found: Any) -> dict[str, Tensor]:
    while isinstance(found, Mapping):
        inner = next((found[key] for key in BUNDLES if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError("the checkpoint holds no state dict: expected names and tensors, bare or under 'state_dict'")
    return dict(found)


def _rename(own: Mapping[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict under the model's names, wherever a key differs from one of them by wrappers alone."""
    names = {_bare(key): key for key in own}
    if len(names) < len(own):  # what looks like a wrapper is a part of this model
        names = {}
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        bare = _bare(key)
        name = key if key in own else names.get(bare, bare)
        if name in renamed:
            raise ValueError(f"the checkpoint has two tensors for {name}")
        if name in own or not bare.startswith(TRAINING_ONLY):
            constant = bare in CONSTANTS.values() and name in own and value.numel() == own[name].numel()
            renamed[name] = value.reshape(own[name].shape) if constant else value
    return renamed


def _bare(key: str) -> str:
    """A key without wrappers; normalisation constants are `mean` and `std` wherever they live."""
    while prefix := next((wrapper for wrapper in WRAPPERS if key.startswith(wrapper)), None):
        key = key.removeprefix(prefix)
    head, _, tail = key.rpartition(".")
    return CONSTANTS[tail] if head in NORMALISERS and tail in CONSTANTS else key


def _may_be_missing(key: str) -> bool:
    return key.endswith(".num_batches_tracked") or _bare(key) in CONSTANTS.values()


def _first(keys: list[str], what: str, count: int = 3) -> str:
    if not keys:
        return ""
    return f"{len(keys)} {what} ({', '.join(keys[:count])}{', ...' if len(keys) > count else ''})"
