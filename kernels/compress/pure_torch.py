"""Compression with torch operations alone, for machines where the C kernels could not be built.

The plan of the C kernels: a sampled bracket, one counting pass, an exact select among the few keys inside the bracket,
one packing pass. Done block by block, so that temporaries stay small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surgeon_fx.kernels.bits.pure_torch import pack_into, unpack_bits
from surgeon_fx.kernels.compress.reference import check_mask
from surgeon_fx.kernels.layout import bit_bytes, keys

BLOCK = 1 << 20
SAMPLE_FROM = 1 << 16
BRACKET_SIGMAS = 4.0


def compress(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    threshold, ties = _threshold(flat, kept)
    values = flat.new_empty(kept)
    bitmask = torch.empty(bit_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    at = 0
    for begin, block in _blocks(flat):
        block_keys = keys(block)
        keep = block_keys > threshold
        if ties:
            tied = block_keys == threshold
            count = int(tied.sum())
            if count > ties:
                tied &= tied.cumsum(0) <= ties
            ties -= min(ties, count)
            keep |= tied
        chosen = block[keep]
        values[at : at + chosen.numel()] = chosen
        at += chosen.numel()
        pack_into(keep, bitmask[begin // 8 :])
    return values, bitmask


def decompress(values: Tensor, bitmask: Tensor, numel: int) -> Tensor:
    keep = unpack_bits(bitmask, numel)
    check_mask(bitmask, values.numel(), keep)
    return values.new_zeros(numel).masked_scatter_(keep, values)


def pick(flat: Tensor, bitmask: Tensor, kept: int) -> Tensor:
    keep = unpack_bits(bitmask, flat.numel())
    check_mask(bitmask, kept, keep)
    return flat.masked_select(keep)


def _blocks(flat: Tensor) -> list[tuple[int, Tensor]]:
    return [(begin, flat[begin : begin + BLOCK]) for begin in range(0, flat.numel(), BLOCK)]


def _threshold(flat: Tensor, kept: int) -> tuple[int, int]:
    """The kept-th largest key, and how many elements equal to it are kept."""
    numel = flat.numel()
    if numel >= SAMPLE_FROM:
        found = _among_bracket(flat, kept, *_bracket(flat, kept))
        if found is not None:
            return found
    threshold = int(keys(flat).kthvalue(numel - kept + 1).values)
    return threshold, kept - sum(int((keys(block) > threshold).sum()) for _, block in _blocks(flat))


def _bracket(flat: Tensor, kept: int) -> tuple[int, int]:
    """Two keys that hold the threshold between them, almost surely: quantiles of one element from each stratum."""
    numel = flat.numel()
    size = int(numel ** (2 / 3))
    stride, strata = numel // size, torch.arange(size, device=flat.device)
    ordered = (
        keys(flat[strata * stride + strata * 2654435761 % 4294967296 * stride // 4294967296])
        .sort(descending=True)
        .values
    )
    share = kept / numel
    margin = BRACKET_SIGMAS * math.sqrt(size * share * (1 - share)) + 2
    upper, lower = int(share * size - margin), int(share * size + margin)
    highest = torch.iinfo(ordered.dtype).max
    return int(ordered[lower]) if lower < size else 0, int(ordered[upper]) if upper >= 0 else highest


def _among_bracket(flat: Tensor, kept: int, lo: int, hi: int) -> tuple[int, int] | None:
    above = at_hi = at_lo = 0
    collected = []
    for _, block in _blocks(flat):
        block_keys = keys(block)
        at_least_lo = block_keys[block_keys >= lo]
        above += int((at_least_lo > hi).sum())
        at_hi += int((at_least_lo == hi).sum())
        at_lo += int((at_least_lo == lo).sum())
        collected.append(at_least_lo[(at_least_lo > lo) & (at_least_lo < hi)])
    inside = torch.cat(collected)
    rank = kept - above
    if rank <= 0:
        return None
    if rank <= at_hi:
        return hi, rank
    rank -= at_hi
    if rank <= inside.numel():
        threshold = int(inside.kthvalue(inside.numel() - rank + 1).values)
        return threshold, rank - int((inside > threshold).sum())
    rank -= inside.numel()
    return (lo, rank) if rank <= at_lo and lo < hi else None
