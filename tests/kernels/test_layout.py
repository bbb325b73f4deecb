import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surgeon_fx.kernels import bit_bytes, kept_count, layout, mask_bytes


@pytest.mark.parametrize(
    ("numel", "ratio", "kept"),
    [
        (10, 0.9, 1),
        (10, 0.0, 10),
        (10, 1.0, 0),
        (0, 0.5, 0),
        (1, 0.9, 1),
        (1000, 0.95, 50),
        (7, 0.5, 4),
        (2**40, 0.5, 2**39),
    ],
)
def test_kept_count(numel, ratio, kept):
    assert kept_count(numel, ratio) == kept


@given(st.integers(1, 2**50), st.floats(0, 1, exclude_max=True))
def test_kept_count_never_drops_more_than_asked(numel, ratio):
    kept = kept_count(numel, ratio)
    assert 1 <= kept <= numel
    assert (numel - kept) / numel <= ratio or math.isclose((numel - kept) / numel, ratio)


@given(st.integers(0, 2**40), st.floats(0, 1), st.floats(0, 1))
def test_kept_count_is_monotonic(numel, a, b):
    assert kept_count(numel, min(a, b)) >= kept_count(numel, max(a, b))


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_bad_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio must be the share to drop"):
        kept_count(10, ratio)


def test_negative_size_is_refused():
    with pytest.raises(ValueError, match="numel must not be negative"):
        kept_count(-1, 0.5)


def test_mask_sizes():
    assert [bit_bytes(n) for n in (0, 1, 8, 9, 64, 65)] == [0, 1, 1, 2, 8, 9]
    assert mask_bytes(100, 100) == mask_bytes(100, 0) == mask_bytes(0, 0) == 0
    assert mask_bytes(100, 99) == 13


@pytest.mark.parametrize(
    ("x", "dense"),
    [
        (torch.zeros(2, 3, 4), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(4, 6)[:, :3], False),
        (torch.zeros(4, 1).expand(4, 3), False),
        (torch.zeros(0, 3).t(), True),
        (torch.zeros(()), True),
    ],
)
def test_dense(x, dense):
    assert layout.is_dense(x) is dense
    copy = layout.densify(x)
    assert layout.is_dense(copy)
    assert (copy is x) is dense
    flat = layout.flatten(copy)
    assert flat.data_ptr() == copy.data_ptr()
    assert torch.equal(layout.unflatten(flat, copy.shape, copy.stride()), x)
