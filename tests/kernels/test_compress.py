"""Every backend means what the reference means, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import DTYPES, LARGE, RATIOS, SIZES, VALUES, assert_same, make, ratios, same_bits, strided_tensors

from surgeon_fx.kernels import (
    Compressed,
    compress,
    decompress,
    kept_count,
    layout,
    mask_bytes,
    pick,
    unavailable_reason,
)

FAST_BACKENDS = [b for b in ("torch", "cpu") if not unavailable_reason(b, "cpu")]


def check(x, ratio):
    expected = compress(x, ratio, backend="reference")
    dense = decompress(expected, backend="reference")
    for backend in FAST_BACKENDS:
        actual = compress(x, ratio, backend=backend)
        assert_same(actual, expected)
        restored = decompress(actual, backend=backend)
        assert same_bits(restored, dense)
        assert restored.stride() == actual.stride
        assert same_bits(pick(x, actual.bitmask, actual.kept, backend=backend), expected.values)


def test_meaning_by_hand():
    x = torch.tensor([3.0, -4.0, 0.0, 4.0, -5.0, 1.0, 2.0, -1.0, 4.0, -0.0])
    c = compress(x, 0.7)
    assert c.values.tolist() == [-4.0, 4.0, -5.0]  # of three fours, the two that come first
    assert c.bitmask.tolist() == [0b00011010, 0]
    assert decompress(c).tolist() == [0, -4.0, 0, 4.0, -5.0, 0, 0, 0, 0, 0]
    assert pick(torch.arange(10.0), c.bitmask, c.kept).tolist() == [1, 3, 4]


def test_nan_is_never_dropped_in_silence():
    x = torch.ones(100)
    x[70] = math.nan
    x[71] = math.inf
    assert compress(x, 0.99).values.isnan().all()
    assert compress(x, 0.98).values.isinf().any()


@pytest.mark.parametrize("backend", ["reference", *FAST_BACKENDS])
def test_order_is_that_of_memory(backend):
    x = make("normal", 2 * 8 * 5 * 5, torch.float32).view(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    restored = decompress(compress(x, 0.9, backend=backend))
    assert restored.is_contiguous(memory_format=torch.channels_last)
    kept = restored != 0
    assert kept.sum() == 40
    assert x[kept].abs().min() >= x[~kept].abs().max()
    assert torch.equal(restored[kept], x[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_equals_reference(dtype, values):
    for size in SIZES:
        x = make(values, size, dtype)
        for ratio in RATIOS:
            check(x, ratio)


@pytest.mark.parametrize("values", ["normal", "relu", "two", "special"])
def test_equals_reference_when_large(values):
    for dtype in (torch.float32, torch.bfloat16):
        check(make(values, LARGE, dtype), 0.9)


@settings(max_examples=200)
@given(x=strided_tensors(), ratio=ratios)
def test_equals_reference_for_any_layout(x, ratio):
    check(x, ratio)


@pytest.mark.parametrize("backend", ["reference", *FAST_BACKENDS])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (), (1,), (5, 7)])
def test_all_or_nothing(backend, shape):
    x = torch.randn(shape)
    kept, nothing = compress(x, 0.0, backend=backend), compress(x, 1.0, backend=backend)
    assert kept.bitmask.numel() == nothing.bitmask.numel() == nothing.values.numel() == 0
    assert same_bits(decompress(kept), x)
    assert kept.values.data_ptr() != x.data_ptr() or x.numel() == 0
    assert torch.equal(decompress(nothing), torch.zeros(shape))


@given(x=strided_tensors(most=2000), ratio=ratios)
def test_sizes_are_those_the_planner_predicts(x, ratio):
    c = compress(x, ratio)
    kept = kept_count(x.numel(), ratio)
    assert c.kept == kept
    assert c.numel == x.numel()
    assert c.nbytes == kept * x.element_size() + mask_bytes(x.numel(), kept)
    assert c.dense_nbytes == x.numel() * x.element_size()
    meta = compress(torch.empty_strided(c.shape, c.stride, dtype=x.dtype, device="meta"), ratio)
    assert (meta.nbytes, meta.stride) == (c.nbytes, c.stride)
    assert decompress(meta).stride() == c.stride


def test_gradient_does_not_flow():
    x = torch.randn(10, requires_grad=True)
    assert not decompress(compress(x, 0.5)).requires_grad


def test_says_what_it_is():
    assert repr(compress(torch.randn(4, 5), 0.9)) == "Compressed((4, 5), torch.float32, 2 of 20 kept, 11 of 80 bytes)"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, dtype=torch.int32), "x must be one of float32, float64, bfloat16, float16, got int32"),
        (torch.ones(4, dtype=torch.bool), "got bool"),
        (torch.ones(4, dtype=torch.complex64), "got complex64"),
        (torch.ones(4, 4).to_sparse(), "x must be a strided tensor, got layout torch.sparse_coo"),
    ],
)
def test_bad_input_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        compress(x, 0.5)


def test_not_a_tensor_is_refused():
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        compress([1.0, 2.0], 0.5)


@pytest.mark.parametrize("ratio", [-0.5, 1.5, math.nan])
def test_bad_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio must be the share to drop"):
        compress(torch.ones(4), ratio)


def altered(c, **parts):
    return Compressed(**{"values": c.values, "bitmask": c.bitmask, "shape": c.shape, "stride": c.stride, **parts})


@pytest.mark.parametrize("backend", ["reference", *FAST_BACKENDS])
def test_parts_that_do_not_match_are_refused(backend):
    c = compress(torch.randn(100), 0.5)
    flipped, stray = c.bitmask.clone(), c.bitmask.clone()
    flipped[3] ^= 1
    stray[-1] ^= 0b11000000
    for broken in (
        altered(c, values=c.values[:-1].clone()),
        altered(c, values=torch.randn(101)),
        altered(c, bitmask=c.bitmask[:-1].clone()),
        altered(c, bitmask=flipped),
        altered(c, bitmask=stray),
        altered(c, bitmask=c.bitmask.int()),
        altered(c, bitmask=c.bitmask.to("meta")),
        altered(c, bitmask=torch.empty(0, dtype=torch.uint8)),
        altered(c, shape=(10, 11), stride=(11, 1)),
        altered(c, values=c.values.view(5, 10)),
    ):
        with pytest.raises(ValueError, match="values|bitmask"):
            decompress(broken, backend=backend)


@pytest.mark.parametrize("backend", ["reference", *FAST_BACKENDS])
def test_places_that_do_not_match_are_refused(backend):
    x, c = torch.randn(100), compress(torch.randn(100), 0.5)
    flipped, stray = c.bitmask.clone(), c.bitmask.clone()
    flipped[3] ^= 1
    stray[-1] ^= 0b11000000
    for bitmask, kept in (
        *((c.bitmask, kept) for kept in (-1, 0, 49, 51, 100, 101)),
        *((broken, 50) for broken in (flipped, stray, c.bitmask[:-1].clone(), c.bitmask.int(), c.bitmask.to("meta"))),
    ):
        with pytest.raises(ValueError, match="kept|bitmask"):
            pick(x, bitmask, kept, backend=backend)
    with pytest.raises(TypeError, match="bitmask must be a tensor"):
        pick(x, [1], 1)


def test_pruned_tensor_of_two_layouts_differs_only_in_ties():
    x = make("normal", 400, torch.float64).view(20, 20)
    assert torch.equal(decompress(compress(x, 0.8)), decompress(compress(x.t(), 0.8)).t())


def test_densify_is_what_non_dense_input_means():
    x = torch.randn(10, 20)[:, ::2]
    assert_same(compress(x, 0.5), compress(layout.densify(x), 0.5))
