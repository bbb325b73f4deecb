"""What bench/kernels.py compares: ways to prune, keep and restore a tensor, and the inputs they are tried on.

copy                    y.copy_(x) into touched memory: the yardstick
clone                   x.clone(), page faults included: the yardstick of code that allocates its output
published               the SURGEON paper's code: topk of |x|, gather, int32 index; scatter into zeros
kthvalue                as BackRazor: kthvalue of |x|, boolean mask, values and packed bits; masked_scatter back.
                        Bits are packed by surgeon_fx, faster than torch can, so that the selection is what differs.
                        Ties with the threshold are dropped, which may be all there is
compressed-tensors      bitmask compression of the PyPI package. It prunes nothing: it gets the tensor already pruned
                        at the ratio, and the pruning is not timed
surgeon_fx:<backend>    surgeon_fx.kernels as a user calls it
surgeon_fx:cpu (touched)  the same kernels, writing to buffers already touched
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from surgeon_fx import kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
REFERENCE_LARGEST = 1 << 18


@dataclass(frozen=True)
class Steps:
    """A provider at one tensor. Yardsticks have one step."""

    compress: Callable[[], Any]
    decompress: Callable[[Any], Tensor] | None = None
    note: str = ""


@dataclass(frozen=True)
class Provider:
    name: str
    prepare: Callable[[Tensor, float], Steps]
    memory: str = "fresh"
    exact: bool = False  # must equal the reference backend bit for bit
    moved_bytes: Callable[[int, int], int] | None = (
        None  # from dense and saved bytes, where the code's traffic is known
    )
    unavailable: Callable[[], str] = str  # why it cannot run here, if so
    largest: int | None = None


def _copy(x: Tensor, ratio: float) -> Steps:
    y = torch.zeros_like(x).fill_(1)  # zeros alone may be pages not yet mapped
    return Steps(lambda: y.copy_(x))


def _clone(x: Tensor, ratio: float) -> Steps:
    return Steps(x.clone)


def _published(x: Tensor, ratio: float) -> Steps:
    kept = kernels.kept_count(x.numel(), ratio)

    def compress() -> tuple[Tensor, Tensor]:
        index = x.abs().topk(kept, sorted=False).indices
        return x[index], index.to(torch.int32)

    def decompress(saved: tuple[Tensor, Tensor]) -> Tensor:
        values, index = saved
        return values.new_zeros(x.numel()).scatter_(0, index.to(torch.int64), values)

    return Steps(compress, decompress)


def _kthvalue(x: Tensor, ratio: float) -> Steps:
    dropped = x.numel() - kernels.kept_count(x.numel(), ratio)

    def compress() -> tuple[Tensor, Tensor]:
        magnitude = x.abs()
        keep = magnitude > magnitude.kthvalue(dropped).values if dropped else torch.ones_like(x, dtype=torch.bool)
        return x[keep], kernels.pack_bits(keep)

    def decompress(saved: tuple[Tensor, Tensor]) -> Tensor:
        values, bits = saved
        return values.new_zeros(x.numel()).masked_scatter_(kernels.unpack_bits(bits, x.numel()), values)

    return Steps(compress, decompress)


@lru_cache(maxsize=1)
def _bitmask_functions() -> tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensor, list[int]], Tensor], str]:
    """compressed-tensors' compress and decompress, and a note on where they came from."""
    for module in ("compressors.sparse_compressors.sparse_bitmask", "compressors.sparse_bitmask"):
        with contextlib.suppress(ImportError, AttributeError):
            own = importlib.import_module(f"compressed_tensors.{module}")
            return own.bitmask_compress, own.bitmask_decompress, ""
    helpers = importlib.import_module("compressed_tensors.utils.helpers")
    pack, unpack = helpers.pack_bitmasks, helpers.unpack_bitmasks

    def compress(x: Tensor) -> tuple[Tensor, Tensor]:
        keep = x != 0
        return x[keep], pack(keep)

    def decompress(values: Tensor, bits: Tensor, shape: list[int]) -> Tensor:
        dense = values.new_zeros(shape)
        dense[unpack(bits, shape)] = values
        return dense

    note = f"{version('compressed-tensors')} has no bitmask compressor any more: what it did, around its bit packing"
    return compress, decompress, note


def _compressed_tensors_unavailable(device: torch.device) -> str:
    if importlib.util.find_spec("compressed_tensors") is None:
        return "compressed-tensors is not installed"
    if device.type != "cpu":
        return "its bit packing works on CPU tensors alone"
    try:
        _bitmask_functions()
    except (ImportError, AttributeError):
        return f"compressed-tensors {version('compressed-tensors')} has neither a bitmask compressor nor bit packing"
    return ""


def _compressed_tensors(x: Tensor, ratio: float) -> Steps:
    compress, decompress, note = _bitmask_functions()
    pruned, shape = kernels.decompress(kernels.compress(x, ratio)), list(x.shape)
    note = "; ".join(filter(None, ("pruned beforehand, not timed", note)))
    return Steps(lambda: compress(pruned), lambda saved: decompress(saved[0], saved[1], shape), note)


def _surgeon_fx(x: Tensor, ratio: float, backend: str) -> Steps:
    return Steps(lambda: kernels.compress(x, ratio, backend), lambda saved: kernels.decompress(saved, backend))


def _surgeon_fx_unavailable(backend: str, device: torch.device) -> str:
    if backend == "triton" and device.type == "cpu":
        return "needs a GPU; its interpreter's times would mean nothing"
    return kernels.unavailable_reason(backend, device.type)


def _surgeon_fx_touched(x: Tensor, ratio: float) -> Steps:
    cpu = importlib.import_module("surgeon_fx.kernels.compress.cpu")  # the attribute of that name is the function
    kept = kernels.kept_count(x.numel(), ratio)
    values, dense = x.new_full((kept,), torch.nan), torch.full_like(x, torch.nan)
    bitmask = torch.full((kernels.mask_bytes(x.numel(), kept),), 0xFF, dtype=torch.uint8)
    saved = kernels.Compressed(values, bitmask, tuple(x.shape), x.stride())

    def compress() -> kernels.Compressed:
        cpu.compress_into(x, values, bitmask)
        return saved

    def decompress(saved: kernels.Compressed) -> Tensor:
        cpu.decompress_into(saved.values, saved.bitmask, dense)
        return dense

    return Steps(compress, decompress)


def _copied(dense: int, saved: int) -> int:
    return 2 * dense


def _compressed_and_restored(dense: int, saved: int) -> int:
    """Two reads of x and one write of values and mask; one read of those and one dense write."""
    return 2 * dense + saved + saved + dense


def providers(device: torch.device) -> dict[str, Provider]:
    no_package = partial(_compressed_tensors_unavailable, device)
    found = [
        Provider("copy", _copy, memory="touched", moved_bytes=_copied),
        Provider("clone", _clone, moved_bytes=_copied),
        Provider("published", _published),
        Provider("kthvalue", _kthvalue),
        Provider("compressed-tensors", _compressed_tensors, unavailable=no_package),
    ]
    for backend in kernels.BACKENDS:
        if backend == "auto":
            continue
        ours = Provider(
            f"surgeon_fx:{backend}",
            partial(_surgeon_fx, backend=backend),
            exact=backend != "reference",
            moved_bytes=_compressed_and_restored if backend in ("cpu", "triton") else None,
            unavailable=partial(_surgeon_fx_unavailable, backend, device),
            largest=REFERENCE_LARGEST if backend == "reference" else None,
        )
        found.append(ours)
        if backend == "cpu":
            found.append(replace(ours, name=f"{ours.name} (touched)", prepare=_surgeon_fx_touched, memory="touched"))
    return {provider.name: provider for provider in found}


def saved_bytes(saved: Any) -> int:
    return saved.nbytes if isinstance(saved, kernels.Compressed) else sum(part.nbytes for part in saved)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _normal(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(numel, dtype=dtype, device=device, generator=_generator(device))


def _two(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device).bernoulli_(0.5, generator=_generator(device)).add_(1)


VALUES: dict[str, Callable[[int, torch.dtype, torch.device], Tensor]] = {
    "normal": _normal,
    "equal": lambda numel, dtype, device: torch.ones(numel, dtype=dtype, device=device),
    "two": _two,
    "sorted": lambda numel, dtype, device: torch.linspace(0, 1, numel, device=device).to(dtype),
    "relu": lambda numel, dtype, device: _normal(numel, dtype, device).relu_(),
}
