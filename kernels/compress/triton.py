"""Compression on CUDA, ROCm and XPU. Integers only: floats travel as their bits, so every dtype takes the same code.

    bracket     one program takes two quantiles of a sample of keys: the threshold lies in [lo, hi], almost surely
    count       one read of x: per block, keys above hi, at hi, at lo; the few strictly inside are collected
    histogram   radix select, 11 bits a launch, among the collected keys. If the bracket missed or they did not fit, the
                same launches run over x itself: the fallback needs no answer from the device, so nothing synchronises
    finish      per block, keys above and equal to the threshold: from the collected keys, or from x after a fallback
    scan        where each block's output starts, and how many ties come before it
    pack        second read of x: compact the kept elements, write the mask

Decompression counts the mask's bits per block, scans, and expands. Offsets are int64 throughout.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgeon_fx.kernels.layout import FLOAT_BITS, bit_bytes

BLOCK = 4096  # elements per program; a multiple of 8, so that no two programs share a byte of mask
SCAN_BLOCK = 1024
SAMPLE = 4096
SAMPLE_FROM = 16 * SAMPLE  # smaller tensors go straight to radix select
BRACKET_SIGMAS = 4.0
RADIX_BITS = tl.constexpr(11)
BINS = tl.constexpr(1 << 11)
HISTOGRAM_PROGRAMS = 256
NUM_WARPS = 8

# What the kernels tell each other, as int64: totals, then one row per level of the radix select.
LO, HI, ABOVE, AT_HI, AT_LO, INSIDE, ROWS = (tl.constexpr(i) for i in range(7))
SOURCE, BASE, BITS, RANK, ROW = (tl.constexpr(i) for i in range(5))
SETTLED, COLLECTED, EVERYTHING = (tl.constexpr(i) for i in range(3))


@triton.jit
def keys_of(bits, nan_key, WIDTH: tl.constexpr):
    if WIDTH == 64:
        magnitude = bits.to(tl.int64) & 0x7FFFFFFFFFFFFFFF
    elif WIDTH == 32:
        magnitude = bits.to(tl.int32) & 0x7FFFFFFF
    else:
        magnitude = bits.to(tl.int32) & 0x7FFF
    return tl.minimum(magnitude, nan_key.to(magnitude.dtype))


@triton.jit
def store_bits(bits, block, set_bits, n, SIZE: tl.constexpr):
    """One block of booleans as bytes, least significant bit first."""
    eights = tl.reshape(set_bits.to(tl.int32), (SIZE // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = block * (SIZE // 8) + tl.arange(0, SIZE // 8)
    tl.store(bits + byte, tl.sum(eights, axis=1).to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def pick_digit(counts, rank):
    """The digit that holds the rank-th largest key, and the rank within that digit's keys."""
    digit = tl.arange(0, BINS)
    from_top = tl.cumsum(counts, 0, reverse=True)
    chosen = tl.sum((from_top >= rank).to(tl.int32)) - 1
    return chosen.to(tl.int64), rank - tl.sum(tl.where(digit == chosen, from_top - counts, 0))


@triton.jit
def digit_counts(distance, valid, bits, shift, SIZE: tl.constexpr):
    """Histogram of the digits of the valid keys, given as distances from the base of a window of 2^bits keys."""
    valid = valid & (distance >= 0) & (distance >> bits == 0)
    strays = SIZE - tl.sum(valid.to(tl.int32))  # counted as digit 0
    counts = tl.histogram(tl.where(valid, distance >> shift, 0).to(tl.int32), BINS)
    return counts - tl.where(tl.arange(0, BINS) == 0, strays, 0)


@triton.jit
def sample_quantile(k, rank, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The rank-th largest of SIZE keys held by one program."""
    base = tl.zeros((), tl.int64)
    bits = tl.full((), WIDTH - 1, tl.int64)
    rank = tl.cast(rank, tl.int64)
    while bits > 0:
        shift = tl.maximum(bits - RADIX_BITS, 0)
        chosen, rank = pick_digit(digit_counts(k - base, k >= 0, bits, shift, SIZE), rank)
        base += chosen << shift
        bits = shift
    return base


@triton.jit
def bracket_kernel(x, state, stride, rank_hi, rank_lo, nan_key, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """[lo, hi] around the wanted rank: two order statistics of one element from each stratum, hashed within it."""
    i = tl.arange(0, SIZE).to(tl.int64)
    spot = ((i + 1) * 2654435761 & 0xFFFFFFFF) * stride >> 32
    k = keys_of(tl.load(x + i * stride + spot), nan_key, WIDTH).to(tl.int64)
    hi = nan_key.to(tl.int64)
    lo = tl.zeros((), tl.int64)
    if rank_hi >= 1:
        hi = sample_quantile(k, rank_hi, WIDTH, SIZE)
    if rank_lo <= SIZE:
        lo = sample_quantile(k, rank_lo, WIDTH, SIZE)
    tl.store(state + HI, hi)
    tl.store(state + LO, lo)


@triton.jit
def count_kernel(x, n, state, blocks, block_count, room, room_size, nan_key, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    valid = at < n
    k = keys_of(tl.load(x + at, mask=valid, other=0), nan_key, WIDTH)
    lo = tl.load(state + LO).to(k.dtype)
    hi = tl.load(state + HI).to(k.dtype)
    inside = valid & (k > lo) & (k < hi)
    above_count = tl.sum((valid & (k > hi)).to(tl.int32))
    hi_count = tl.sum((valid & (k == hi)).to(tl.int32))
    lo_count = tl.sum((valid & (k == lo) & (lo < hi)).to(tl.int32))
    inside_count = tl.sum(inside.to(tl.int32))
    start = tl.atomic_add(state + INSIDE, inside_count.to(tl.int64))
    tl.atomic_add(state + ABOVE, above_count.to(tl.int64))
    tl.atomic_add(state + AT_HI, hi_count.to(tl.int64))
    tl.atomic_add(state + AT_LO, lo_count.to(tl.int64))
    spot = start + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(room + spot, k.to(room.dtype.element_ty), mask=inside & (spot < room_size))
    tl.store(blocks + block, above_count.to(tl.int64))
    tl.store(blocks + block_count + block, hi_count.to(tl.int64))
    tl.store(blocks + 2 * block_count + block, lo_count.to(tl.int64))
    tl.store(blocks + 3 * block_count + block, inside_count.to(tl.int64))
    tl.store(blocks + 4 * block_count + block, start)


@triton.jit
def bit_length(value):
    return tl.sum((value >> tl.arange(0, 64).to(tl.int64) > 0).to(tl.int64))


@triton.jit
def window(state, bins, kept, room_size, nan_key, LEVEL: tl.constexpr):
    """Where the threshold lies before radix level LEVEL: the keys [base, base + 2^bits), the rank from their top."""
    if LEVEL == 0:
        lo = tl.load(state + LO)
        hi = tl.load(state + HI)
        inside = tl.load(state + INSIDE)
        at_lo = tl.load(state + AT_LO)
        rank_hi = kept - tl.load(state + ABOVE)
        rank_inside = rank_hi - tl.load(state + AT_HI)
        rank_lo = rank_inside - inside
        is_hi = (rank_hi > 0) & (rank_inside <= 0)
        is_lo = (rank_lo > 0) & (rank_lo <= at_lo)
        is_inside = (rank_inside > 0) & (rank_lo <= 0) & (inside <= room_size)
        settled = is_hi | is_lo
        source = tl.where(settled, SETTLED, tl.where(is_inside, COLLECTED, EVERYTHING)).to(tl.int64)
        base = tl.where(is_hi, hi, tl.where(is_lo | is_inside, lo, 0))
        span = tl.where(settled, 0, tl.where(is_inside, hi - lo, nan_key))
        bits = bit_length(span)
        rank = tl.where(is_hi, rank_hi, tl.where(is_lo, rank_lo, tl.where(is_inside, rank_inside, kept)))
    else:
        row = state + ROWS + (LEVEL - 1) * ROW
        source = tl.load(row + SOURCE)
        base = tl.load(row + BASE)
        bits = tl.load(row + BITS)
        rank = tl.load(row + RANK)
        if bits > 0:
            shift = tl.maximum(bits - RADIX_BITS, 0)
            chosen, rank = pick_digit(tl.load(bins + (LEVEL - 1) * BINS + tl.arange(0, BINS)), rank)
            base += chosen << shift
            bits = shift
    if tl.program_id(0) == 0:
        row = state + ROWS + LEVEL * ROW
        tl.store(row + SOURCE, source)
        tl.store(row + BASE, base)
        tl.store(row + BITS, bits)
        tl.store(row + RANK, rank)
    return source, base, bits, rank


@triton.jit
def histogram_kernel(
    x, n, room, room_size, state, bins, kept, nan_key, LEVEL: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    source, base, bits, _ = window(state, bins, kept, room_size, nan_key, LEVEL)
    if bits > 0:
        shift = tl.maximum(bits - RADIX_BITS, 0)
        keys = room
        size = tl.load(state + INSIDE)
        if source == EVERYTHING:
            keys = x
            size = tl.cast(n, tl.int64)
        counts = tl.zeros((BINS,), tl.int32)
        for begin in range(tl.program_id(0).to(tl.int64) * SIZE, size, tl.num_programs(0).to(tl.int64) * SIZE):
            at = begin + tl.arange(0, SIZE)
            distance = keys_of(tl.load(keys + at, mask=at < size, other=0), nan_key, WIDTH).to(tl.int64) - base
            counts += digit_counts(distance, at < size, bits, shift, SIZE)
        tl.atomic_add(bins + LEVEL * BINS + tl.arange(0, BINS), counts.to(tl.int64), mask=counts > 0)


@triton.jit
def finish_kernel(
    x,
    n,
    room,
    room_size,
    state,
    bins,
    blocks,
    block_count,
    kept,
    nan_key,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Leaves in the first two rows of `blocks` the keys above and equal to the threshold."""
    source, threshold, _, _ = window(state, bins, kept, room_size, nan_key, LEVELS)
    block = tl.program_id(0).to(tl.int64)
    lo = tl.load(state + LO)
    hi = tl.load(state + HI)
    above = tl.load(blocks + block)
    tied = tl.load(blocks + block_count + block)
    lo_count = tl.load(blocks + 2 * block_count + block)
    inside = tl.load(blocks + 3 * block_count + block)
    keys = room
    begin = tl.load(blocks + 4 * block_count + block)
    size = inside
    if source == EVERYTHING:
        keys = x
        begin = block * SIZE
        size = tl.minimum(n - begin, SIZE)
        above = tl.zeros_like(above)
    if source == SETTLED:
        if threshold < hi:
            above += tied + inside
            tied = lo_count
    else:
        if source == COLLECTED:
            above += tied
        i = tl.arange(0, SIZE)
        k = keys_of(tl.load(keys + begin + i, mask=i < size, other=0), nan_key, WIDTH).to(tl.int64)
        above += tl.sum(((i < size) & (k > threshold)).to(tl.int64))
        tied = tl.sum(((i < size) & (k == threshold)).to(tl.int64))
        if (source == COLLECTED) & (threshold == lo):
            tied = lo_count
    tl.store(blocks + block, above)
    tl.store(blocks + block_count + block, tied)


@triton.jit
def scan_kernel(blocks, block_count, row, WITH_TIES: tl.constexpr, SIZE: tl.constexpr):
    """Turns counts per block into what comes before it: outputs (first row), and ties (second row)."""
    offset = tl.zeros((), tl.int64)
    ties_before = tl.zeros((), tl.int64)
    ties = offset
    if WITH_TIES:
        ties = tl.load(row + RANK)
    for begin in range(0, block_count, SIZE):
        at = begin + tl.arange(0, SIZE)
        emitted = tl.load(blocks + at, mask=at < block_count, other=0)
        if WITH_TIES:
            tied = tl.load(blocks + block_count + at, mask=at < block_count, other=0)
            before = ties_before + tl.cumsum(tied, 0) - tied
            emitted += tl.minimum(tl.maximum(ties - before, 0), tied)
            tl.store(blocks + block_count + at, before, mask=at < block_count)
            ties_before += tl.sum(tied)
        tl.store(blocks + at, offset + tl.cumsum(emitted, 0) - emitted, mask=at < block_count)
        offset += tl.sum(emitted)


@triton.jit
def pack_kernel(x, n, values, bitmask, blocks, block_count, row, nan_key, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    raw = tl.load(x + at, mask=at < n, other=0)
    k = keys_of(raw, nan_key, WIDTH)
    threshold = tl.load(row + BASE).to(k.dtype)
    ties_left = tl.load(row + RANK) - tl.load(blocks + block_count + block)
    tied = (at < n) & (k == threshold)
    keep = ((at < n) & (k > threshold)) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties_left))
    spot = tl.load(blocks + block) + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(values + spot, raw, mask=keep)
    store_bits(bitmask, block, keep, n, SIZE)


@triton.jit
def popcount_kernel(bitmask, size, blocks, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bitmask + at, mask=at < size, other=0).to(tl.int32)
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    tl.store(blocks + block, tl.sum((fours + (fours >> 4)) & 0xF).to(tl.int64))


@triton.jit
def expand_kernel(values, kept, bitmask, out, n, blocks, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bitmask + at // 8, mask=at < n, other=0).to(tl.int32)
    keep = (byte >> (at % 8).to(tl.int32)) & 1
    spot = tl.load(blocks + block) + tl.cumsum(keep, 0) - 1
    found = tl.load(values + spot, mask=(keep == 1) & (spot < kept), other=0)
    tl.store(out + at, found, mask=at < n)


@triton.jit
def pick_kernel(x, bitmask, out, n, kept, blocks, SIZE: tl.constexpr):
    """The other way: elements to where their block's values start, plus their rank in the block."""
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bitmask + at // 8, mask=at < n, other=0).to(tl.int32)
    keep = (byte >> (at % 8).to(tl.int32)) & 1
    spot = tl.load(blocks + block) + tl.cumsum(keep, 0) - 1
    element = tl.load(x + at, mask=at < n, other=0)
    tl.store(out + spot, element, mask=(at < n) & (keep == 1) & (spot < kept))


def levels(width: int) -> int:
    """Radix levels for keys of `width` - 1 bits."""
    return math.ceil((width - 1) / RADIX_BITS.value)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    return contextlib.nullcontext() if x.device.type == "cpu" else torch.get_device_module(x.device).device(x.device)


def compress(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    values = flat.new_empty(kept)
    bitmask = torch.empty(bit_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    with on_device(flat):
        _compress_into(flat, values, bitmask)
    return values, bitmask


def _compress_into(flat: Tensor, values: Tensor, bitmask: Tensor) -> None:
    float_bits = FLOAT_BITS[flat.dtype]
    n, kept, nan_key = flat.numel(), values.numel(), float_bits.nan_key
    width = 8 * flat.element_size()
    x, out = flat.view(float_bits.integer), values.view(float_bits.integer)
    block_count = triton.cdiv(n, BLOCK)
    blocks = torch.zeros(5, block_count, dtype=torch.int64, device=flat.device)
    depth, bin_count = levels(width), BINS.value
    rows = ROWS.value + (depth + 1) * ROW.value
    scratch = torch.zeros(rows + depth * bin_count, dtype=torch.int64, device=flat.device)
    state, bins = scratch[:rows], scratch[rows:]
    common = {"WIDTH": width, "SIZE": BLOCK, "num_warps": NUM_WARPS}

    room, room_size = out, 0
    if n >= SAMPLE_FROM:
        share = kept / n
        margin = BRACKET_SIGMAS * math.sqrt(SAMPLE * share * (1 - share)) + 2
        room_size = int(1.5 * 2 * margin / SAMPLE * n)
        if room_size > kept:  # else the output is scratch until it is written
            room = torch.empty(room_size, dtype=x.dtype, device=x.device)
        rank_hi, rank_lo = int(share * SAMPLE - margin), int(share * SAMPLE + margin) + 1
        bracket_kernel[(1,)](
            x, state, n // SAMPLE, rank_hi, rank_lo, nan_key, WIDTH=width, SIZE=SAMPLE, num_warps=NUM_WARPS
        )
        count_kernel[(block_count,)](x, n, state, blocks, block_count, room, room_size, nan_key, **common)
    programs = min(block_count, HISTOGRAM_PROGRAMS)
    for level in range(depth):
        histogram_kernel[(programs,)](x, n, room, room_size, state, bins, kept, nan_key, LEVEL=level, **common)
    finish_kernel[(block_count,)](
        x, n, room, room_size, state, bins, blocks, block_count, kept, nan_key, LEVELS=depth, **common
    )
    row = state[ROWS.value + depth * ROW.value :]
    scan_kernel[(1,)](blocks, block_count, row, WITH_TIES=True, SIZE=SCAN_BLOCK, num_warps=NUM_WARPS)
    pack_kernel[(block_count,)](x, n, out, bitmask, blocks, block_count, row, nan_key, **common)


def decompress(values: Tensor, bitmask: Tensor, numel: int) -> Tensor:
    """Whether the mask has as many bits as there are values is not checked: the answer would stall the device."""
    flat = values.new_empty(numel)
    integer = FLOAT_BITS[values.dtype].integer
    with on_device(values):
        blocks = _block_starts(bitmask, numel)
        expand_kernel[(blocks.numel(),)](
            values.view(integer),
            values.numel(),
            bitmask,
            flat.view(integer),
            numel,
            blocks,
            SIZE=BLOCK,
            num_warps=NUM_WARPS,
        )
    return flat


def pick(flat: Tensor, bitmask: Tensor, kept: int) -> Tensor:
    """As in `decompress`, nobody checks how many bits the mask has; what it lacks is zero."""
    values = flat.new_zeros(kept)
    integer = FLOAT_BITS[flat.dtype].integer
    with on_device(flat):
        blocks = _block_starts(bitmask, flat.numel())
        pick_kernel[(blocks.numel(),)](
            flat.view(integer),
            bitmask,
            values.view(integer),
            flat.numel(),
            kept,
            blocks,
            SIZE=BLOCK,
            num_warps=NUM_WARPS,
        )
    return values


def _block_starts(bitmask: Tensor, numel: int) -> Tensor:
    """Where the values of each block start."""
    block_count = triton.cdiv(numel, BLOCK)
    blocks = torch.empty(block_count, dtype=torch.int64, device=bitmask.device)
    popcount_kernel[(block_count,)](bitmask, bitmask.numel(), blocks, SIZE=BLOCK // 8, num_warps=NUM_WARPS)
    scan_kernel[(1,)](blocks, block_count, blocks, WITH_TIES=False, SIZE=SCAN_BLOCK, num_warps=NUM_WARPS)
    return blocks
