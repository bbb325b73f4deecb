"""Weight gradients on CUDA, ROCm and XPU: the pruned tensor is restored a tile at a time, on chip.

    dw[row, (column, tap)] = sum over places q of near[row, q] * far[column, q * stride - padding + tap * dilation]

An implicit matrix product. `near` is the tensor whose places are summed over, `far` the one that is read under a tap:
gradient and input of a convolution, input and gradient of a transposed one. The matrix unit takes dense tiles, so zeros
are multiplied too; what is saved is writing and reading the dense input.

    index      per 16 elements, their bits and how many are kept before them in their block; per block, how many in all
    scan       how many are kept before each block
    product    a program sums one tile of dw over a share of the places; the shares are added up in a fixed order

What is not finite: a kept value behaves as in dense arithmetic. An infinite or NaN gradient meets the zeros of its
tile, those of dropped elements and of the padding, and makes NaN of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgeon_fx.kernels.compress.triton import BLOCK, NUM_WARPS, SCAN_BLOCK, on_device, scan_kernel
from surgeon_fx.kernels.sparse_grad import DTYPES, GPU_TILE, reference

BLOCK_BITS = tl.constexpr(BLOCK.bit_length() - 1)
RESTORED, DENSE = 32, GPU_TILE  # rows or columns of a tile, at most: a restored element is used DENSE times
LEAST_TILE = 16  # tl.dot's
TILE_BYTES = 64  # of a row of places: longer ones spill registers in float32
PROGRAMS = 512  # fewer tiles than this are split over the places
LEAST_STEPS = 8  # of a program, in tiles: fewer are not worth a sum of their own
NUM_STAGES = 2  # three spill
MOST_PLACES = 2**30  # places are counted in 32 bits: dividing in 64 would cost more than the product


@triton.jit
def popcount(bits):
    bits = bits.to(tl.uint32)
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def index_kernel(bitmask, size, entries, blocks, SIZE: tl.constexpr):
    """SIZE bytes of mask: an entry is 16 bits of it, and above them the count of bits before it in the block."""
    block = tl.program_id(0).to(tl.int64)
    at = block * SIZE + tl.arange(0, SIZE)
    byte = tl.load(bitmask + at, mask=at < size, other=0).to(tl.int32)
    bits = tl.sum(tl.reshape(byte, (SIZE // 2, 2)) << (8 * tl.arange(0, 2))[None, :], axis=1)
    counts = popcount(bits)
    entry = block * (SIZE // 2) + tl.arange(0, SIZE // 2)
    tl.store(entries + entry, bits | ((tl.cumsum(counts, 0) - counts) << 16), mask=entry * 2 < size)
    tl.store(blocks + block, tl.sum(counts).to(tl.int64))


@triton.jit
def restore(values, kept, entries, blocks, at, valid):
    """The elements at these places in memory order; zero where dropped or not valid."""
    entry = tl.load(entries + (at >> 4), mask=valid, other=0)
    bit = (at & 15).to(tl.int32)
    keep = ((entry >> bit) & 1) != 0
    before = (entry >> 16) + popcount(entry & ((1 << bit) - 1))
    spot = tl.load(blocks + (at >> BLOCK_BITS), mask=keep, other=0) + before
    return tl.load(values + spot, mask=keep & (spot < kept), other=0.0)


@triton.jit
def product_kernel(
    grad,
    values,
    kept,
    entries,
    blocks,
    partial,
    rows,
    columns,
    places,
    share,
    splits,
    near_sample,
    near_channel,
    near_stride_d,
    near_stride_h,
    near_stride_w,
    far_sample,
    far_channel,
    far_stride_d,
    far_stride_h,
    far_stride_w,
    near_d,
    near_h,
    near_w,
    far_d,
    far_h,
    far_w,
    taps_d,
    taps_h,
    taps_w,
    stride_d,
    stride_h,
    stride_w,
    padding_d,
    padding_h,
    padding_w,
    dilation_d,
    dilation_h,
    dilation_w,
    TRANSPOSED: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of a group's dw over `share` places. Programs side by side have the same columns, restored by each."""
    taps = taps_d * taps_h * taps_w
    tiles_m = tl.cdiv(rows, M)
    tiles_n = tl.cdiv(columns * taps, N)
    program = tl.program_id(0)
    row = program % tiles_m * M + tl.arange(0, M)
    program = program // tiles_m
    at_n = program % tiles_n * N + tl.arange(0, N)
    program = program // tiles_n
    split = program % splits
    group = (program // splits).to(tl.int64)

    if CHANNELS_LAST:  # consecutive columns are consecutive in memory
        column = at_n % columns
        tap = at_n // columns
    else:  # taps of a channel read the same memory
        column = at_n // taps
        tap = at_n % taps
    in_rows = row < rows
    in_columns = at_n < columns * taps
    tap_w = tap % taps_w * dilation_w
    tap_h = tap // taps_w % taps_h * dilation_h
    tap_d = tap // (taps_w * taps_h) * dilation_d
    near_row = (group * rows + row) * near_channel
    far_column = (group * columns + column) * far_channel
    far_column += tap_d.to(tl.int64) * far_stride_d + tap_h.to(tl.int64) * far_stride_h
    far_column += tap_w.to(tl.int64) * far_stride_w

    sums = tl.zeros((M, N), tl.float32)
    first = split * share
    for begin in range(first, first + tl.minimum(share, places - first), Q):
        q = begin + tl.arange(0, Q)
        in_places = q < places
        w = q % near_w
        h = q // near_w % near_h
        d = q // near_w // near_h % near_d
        sample = (q // near_w // near_h // near_d).to(tl.int64)
        near_place = sample * near_sample + d.to(tl.int64) * near_stride_d
        near_place += h.to(tl.int64) * near_stride_h + w.to(tl.int64) * near_stride_w
        d = d * stride_d - padding_d
        h = h * stride_h - padding_h
        w = w * stride_w - padding_w
        far_place = sample * far_sample + d.to(tl.int64) * far_stride_d
        far_place += h.to(tl.int64) * far_stride_h + w.to(tl.int64) * far_stride_w

        in_near = in_rows[:, None] & in_places[None, :]
        in_far = in_places[:, None] & in_columns[None, :]
        if PADDED:
            depth = d[:, None] + tap_d[None, :]
            height = h[:, None] + tap_h[None, :]
            width = w[:, None] + tap_w[None, :]
            in_far = in_far & (depth >= 0) & (depth < far_d) & (height >= 0) & (height < far_h)
            in_far = in_far & (width >= 0) & (width < far_w)
        at_near = near_row[:, None] + near_place[None, :]
        at_far = far_place[:, None] + far_column[None, :]
        if TRANSPOSED:
            near = restore(values, kept, entries, blocks, at_near, in_near)
            far = tl.load(grad + at_far, mask=in_far, other=0.0)
        else:
            near = tl.load(grad + at_near, mask=in_near, other=0.0)
            far = restore(values, kept, entries, blocks, at_far, in_far)
        if WIDEN:  # the interpreter's dot takes bfloat16 for integers
            near = near.to(tl.float32)
            far = far.to(tl.float32)
        sums = tl.dot(near, far, sums, input_precision="ieee")

    weights = columns * taps
    groups = tl.num_programs(0) // (tiles_m * tiles_n * splits)
    at_row = ((split * groups + group) * rows + row) * weights
    at_dw = at_row[:, None] + (column * taps + tap)[None, :]
    tl.store(partial + at_dw, sums, mask=in_rows[:, None] & in_columns[None, :])


def conv_weight_grad(
    grad: Tensor,
    values: Tensor,
    bitmask: Tensor,
    input_size: Sequence[int],
    input_stride: Sequence[int],
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Tensor:
    places = input_size[0] * max(math.prod(input_size[2:]), math.prod(grad.shape[2:]))
    if not _is_sparse(grad, values, bitmask, places):
        return reference.conv_weight_grad(
            grad=grad,
            values=values,
            bitmask=bitmask,
            input_size=input_size,
            input_stride=input_stride,
            weight_size=weight_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=transposed,
            groups=groups,
        )
    geometry = [weight_size[2:], stride, padding, dilation]
    gradient, input = (grad.shape, grad.stride()), (input_size, input_stride)
    near, far = (input, gradient) if transposed else (gradient, input)
    return _run(grad, values, bitmask, near, far, geometry, transposed, groups).view(*weight_size)


def linear_weight_grad(grad: Tensor, values: Tensor, bitmask: Tensor, inputs: int) -> Tensor:
    rows = grad.shape[0]
    if not _is_sparse(grad, values, bitmask, rows):
        return reference.linear_weight_grad(grad, values, bitmask, inputs)
    near, far = (grad.shape, grad.stride()), ((rows, inputs), (inputs, 1))
    return _run(grad, values, bitmask, near, far, geometry=[(), (), (), ()], transposed=False, groups=1)


def _is_sparse(grad: Tensor, values: Tensor, bitmask: Tensor, places: int) -> bool:
    """Whether the kernel takes it: where all or nothing was kept, there is no mask."""
    return (
        grad.dtype in DTYPES
        and grad.dtype == values.dtype
        and grad.numel() > 0
        and bitmask.numel() > 0
        and places <= MOST_PLACES
    )


def _run(
    grad: Tensor,
    values: Tensor,
    bitmask: Tensor,
    near: tuple[Sequence[int], Sequence[int]],
    far: tuple[Sequence[int], Sequence[int]],
    geometry: Sequence[Sequence[int]],
    transposed: bool,
    groups: int,
) -> Tensor:
    """dw as [rows, columns * taps], from sizes and strides of both tensors, and taps, stride, padding and dilation."""
    (near_size, near_stride), (far_size, far_stride) = near, far
    rows, columns = near_size[1] // groups, far_size[1] // groups
    places, weights = near_size[0] * math.prod(near_size[2:]), columns * math.prod(geometry[0])
    tile = tile_sizes(rows, weights, grad.element_size(), transposed)
    tiles = groups * triton.cdiv(rows, tile["M"]) * triton.cdiv(weights, tile["N"])
    share = share_of_places(places, tiles, tile["Q"])
    splits = triton.cdiv(places, share)
    block_count = triton.cdiv(bitmask.numel() * 8, BLOCK)
    taps, stride, padding, dilation = geometry
    with on_device(grad):
        entries = torch.empty(triton.cdiv(bitmask.numel(), 2), dtype=torch.int32, device=grad.device)
        blocks = torch.empty(block_count, dtype=torch.int64, device=grad.device)
        partial = grad.new_empty((splits, groups * rows, weights), dtype=torch.float32)
        index_kernel[(block_count,)](bitmask, bitmask.numel(), entries, blocks, SIZE=BLOCK // 8, num_warps=NUM_WARPS)
        scan_kernel[(1,)](blocks, block_count, blocks, WITH_TIES=False, SIZE=SCAN_BLOCK, num_warps=NUM_WARPS)
        product_kernel[(tiles * splits,)](
            *(grad, values, values.numel(), entries, blocks, partial),
            *(rows, columns, places, share, splits),
            *(*near_stride[:2], *_three(near_stride[2:], 0)),
            *(*far_stride[:2], *_three(far_stride[2:], 0)),
            *(*_three(near_size[2:], 1), *_three(far_size[2:], 1)),
            *(*_three(taps, 1), *_three(stride, 1), *_three(padding, 0), *_three(dilation, 1)),
            TRANSPOSED=transposed,
            PADDED=any(padding),
            CHANNELS_LAST=far_stride[1] == 1,
            **tile,
            WIDEN=grad.device.type == "cpu" and grad.dtype is torch.bfloat16,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        return (partial[0] if splits == 1 else partial.sum(0)).to(grad.dtype)


def tile_sizes(rows: int, weights: int, element_size: int, transposed: bool) -> dict[str, int]:
    """Rows, columns and places of a program's tiles."""
    most_rows, most_weights = (RESTORED, DENSE) if transposed else (DENSE, RESTORED)
    return {
        "M": min(most_rows, max(LEAST_TILE, triton.next_power_of_2(rows))),
        "N": min(most_weights, max(LEAST_TILE, triton.next_power_of_2(weights))),
        "Q": TILE_BYTES // element_size,
    }


def share_of_places(places: int, tiles: int, step: int) -> int:
    """How many places a program sums over, in whole steps: all of them where there are tiles enough."""
    steps = triton.cdiv(places, step)
    splits = min(triton.cdiv(PROGRAMS, tiles), triton.cdiv(steps, LEAST_STEPS))
    return triton.cdiv(steps, splits) * step


def _three(sizes: Sequence[int], fill: int) -> tuple[int, ...]:
    """One number each for depth, height and width; what is missing is filled in front."""
    return (*[fill] * (3 - len(sizes)), *sizes)
