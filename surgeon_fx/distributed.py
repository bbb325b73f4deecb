"""Models that several processes train together: what wraps or shards them, and numbers that ranks agree on.

Nothing of `torch.distributed.fsdp` is imported here: a model can only be sharded if somebody else has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from surgeon_fx.inputs import first_tensor


class Ranks:
    """The processes that train one model."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.device = torch.device("cpu") if "gloo" in str(dist.get_backend(group)) else device

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums of each number over the ranks, in one collective. Every rank must call it."""
        both = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(both, group=self.group)
        return both.tolist()


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that train a model together, by the wrapper that can be seen from it; None if there is one rank."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _several(module.process_group, module.device)
        if is_sharded(module):
            weight = next((p for p in module.parameters() if is_dtensor(p)), None)
            if weight is not None:
                mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
                group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
                return _several(group, weight.to_local().device)  # type: ignore[attr-defined]
    return None


def all_ranks(model: nn.Module, group: Any = None) -> Ranks | None:
    """The ranks of a group; by default those of the model's wrapper, or all there are; None if there is one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if group is None and (found := ranks_of(model)) is not None:
        return found
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return _several(group or dist.group.WORLD, device)


def _several(group: Any, device: Any) -> Ranks | None:
    found = Ranks(group, torch.device(device or "cpu"))
    return found if found.size > 1 else None


def is_dtensor(x: Any) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gathers_weights(model: nn.Module | None) -> bool:
    """Whether parts of a model gather their weights to run and give them up again. None: whether any may."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    if model is None:
        return True
    return any(is_sharded(part) or type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())


def sharded_parts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_sharded(module)]


def reshard(model: nn.Module) -> None:
    """Has the modules hold their own parameters again: after a forward without backward the gathered ones stay."""
    for part in sharded_parts(model):
        part.reshard()  # type: ignore[operator]


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is, or holds, one in `DistributedDataParallel`."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel` wraps, or the model itself."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def check_wrappers(model: nn.Module) -> None:
    """Raises where `transform` comes too late, or cannot work."""
    for name, module in model.named_modules():
        what = f"model's part {name}" if name else "model"
        if isinstance(module, DataParallel):
            raise ValueError(
                f"{what} is in nn.DataParallel, which copies modules without their forwards: "
                "use DistributedDataParallel, with a process per device"
            )
        if is_sharded(module):
            raise ValueError(f"{what} is sharded: transform the model first, then call fully_shard on the result")
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(f"{what} is sharded: transform the model first, then wrap it; prefer fully_shard (FSDP2)")


def check_reduced(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
    """Raises where `DistributedDataParallel` waits for gradients of parameters that are not trained."""
    ids = {id(parameter) for parameter in trained.values()}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters:
            waits = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in ids]
            if waits and trained:
                raise ValueError(
                    f"DistributedDataParallel waits for a gradient of {waits[0]}, which is not trained: set "
                    "requires_grad=False on what is not trained before wrapping, or find_unused_parameters=True"
                )


def is_empty(inputs: Any) -> bool:
    """Whether a batch has no samples."""
    x = first_tensor(inputs)
    return x is not None and x.dim() > 0 and not x.shape[0]


def zeros_like(inputs: Any) -> Any:
    """A batch of zeros with the shapes of another; of one sample where that has none."""
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros((max(x.shape[0], 1), *x.shape[1:])) if x.dim() else x

    return tree_map_only(Tensor, zeros, inputs)


def zero_loss(outputs: Any) -> Tensor:
    """A loss without gradient, through which every rank takes part in a backward."""
    found = [x for x in tree_leaves(_values(outputs)) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError("the model must return a tensor that depends on its parameters")
    return torch.stack([(x.float() * 0).sum() for x in found]).sum()


def _values(outputs: Any) -> Any:
    if isinstance(outputs, Tensor | tuple | list):
        return outputs
    return dict(outputs) if isinstance(outputs, Mapping) else vars(outputs)
