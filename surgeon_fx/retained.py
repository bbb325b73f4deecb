"""What an autograd graph keeps alive, read off the graph itself: the measure other numbers are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from surgeon_fx.distributed import local, sharded_parts

RAW = "_raw_saved_"  # autograd nodes show each saved tensor, as it is packed, under a name that starts so


def nodes(outputs: Any) -> Iterator[Any]:
    """Every autograd node of the graph behind the tensors in `outputs`, consumers before producers."""
    ahead = [x.grad_fn for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)


def saved_by(node: Any) -> list[Tensor | None]:
    """What one node holds: saved tensors in their order, None for those that are freed, and tensors on its context."""
    found: list[Tensor | None] = []
    for name in _raw_names(type(node)):  # type: ignore[arg-type]
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed by backward
            continue
        for one in raw if isinstance(raw, tuple) else (raw,):
            packed = None if one is None else one.data
            if packed is None or isinstance(packed, Tensor):
                found.append(packed)
            else:  # hooks of others pack what they like; tensors in it count
                found += [x for x in tree_leaves(packed) if isinstance(x, Tensor)] or [None]
    own = getattr(node, "__dict__", None)
    return found + [x for x in tree_leaves(own) if isinstance(x, Tensor)] if own else found


@lru_cache(1024)
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(RAW))


def storages(held: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of each storage behind what is held, by its identity."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None}


def own_storages(model: nn.Module, outputs: Any) -> dict[int, int]:
    """Storages of a model's parameters and buffers; of a sharded one also what it gathered for the graph of outputs."""
    tensors: list[Tensor | None] = [*model.parameters(), *model.buffers()]
    if sharded_parts(model):
        tensors = [local(x) if x is not None else None for x in tensors]
        saved = [x for node in nodes(outputs) for x in saved_by(node) if x is not None]
        tensors += [x for x in saved if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)]
    return storages(tensors)


def retained_bytes(outputs: Any, model: nn.Module, others: Iterable[Tensor] = ()) -> int:
    """Bytes that backward from `outputs` keeps alive: unique storages, the model's parameters and buffers apart.

    `others` are tensors that are kept beside the graph, where it cannot be seen.
    """
    own = own_storages(model, outputs)
    found = storages(one for node in nodes(outputs) for one in saved_by(node)) | storages(others)
    return sum(size for storage, size in found.items() if storage not in own)
