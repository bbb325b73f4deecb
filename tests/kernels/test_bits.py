import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, VALUES, make, strided_tensors

from surgeon_fx.kernels import (
    bit_bytes,
    mask_by_bits,
    pack_bits,
    pack_sign,
    unavailable_reason,
    unpack_bits,
    unpack_value,
)

BACKENDS = [b for b in ("reference", "torch", "cpu") if not unavailable_reason(b, "cpu")]


def test_layout_by_hand():
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    assert pack_bits(mask).tolist() == [0b00001101, 0b00000010]


@pytest.mark.parametrize("backend", BACKENDS)
@given(bits=st.lists(st.booleans(), max_size=300), offset=st.integers(0, 9))
def test_pack_and_back(backend, bits, offset):
    mask = torch.tensor([True] * offset + bits, dtype=torch.bool)[offset:]
    packed = pack_bits(mask, backend=backend)
    assert torch.equal(packed, pack_bits(mask, backend="reference"))
    assert packed.numel() == bit_bytes(len(bits))
    assert unpack_bits(packed, len(bits), backend=backend).tolist() == bits


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_any_layout(backend):
    mask = torch.rand(3, 70, 111, 101).contiguous(memory_format=torch.channels_last) > 0.3
    packed = pack_bits(mask, backend=backend)
    assert torch.equal(packed, pack_bits(mask.permute(0, 2, 3, 1), backend="reference"))
    assert torch.equal(unpack_bits(packed, mask.shape, mask.stride(), backend=backend), mask)
    sliced = mask[:, ::2, 1:]
    assert torch.equal(
        unpack_bits(pack_bits(sliced, backend=backend), sliced.clone().shape, sliced.clone().stride()), sliced
    )


@pytest.mark.parametrize("backend", BACKENDS)
@given(x=strided_tensors(most=5000))
def test_sign_is_where_relu_passes_the_gradient(backend, x):
    dense = x.clone()
    packed = pack_sign(x, backend=backend)
    assert torch.equal(unpack_bits(packed, dense.shape, dense.stride()), ~(dense <= 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 8200, 70_001, 3_000_001])
def test_value_where_a_bit_is_set(backend, dtype, size):
    mask, value = torch.rand(size) > 0.4, torch.tensor(1 / 3, dtype=dtype)
    actual = unpack_value(pack_bits(mask), value, size, backend=backend)
    assert actual.dtype is dtype
    assert torch.equal(actual, torch.where(mask, value, 0.0))


@pytest.mark.parametrize("backend", BACKENDS)
@given(x=strided_tensors(most=5000))
def test_masked_where_no_bit_is_set(backend, x):
    mask = ~(x <= 0)
    masked = mask_by_bits(x, pack_bits(mask), backend=backend)
    assert torch.equal(masked.isnan(), x.isnan() & mask)
    assert torch.equal(masked.nan_to_num(), torch.where(mask, x, 0.0).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_sign_agrees_with_autograd(dtype, values):
    x = make(values, 70_001, dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(x.relu().sum(), x)
    assert torch.equal(unpack_bits(pack_sign(x), x.shape), gradient.bool())


def test_nan_of_either_sign_counts_as_positive():
    assert pack_sign(torch.tensor([math.nan, -math.nan, -0.0, 0.0, math.inf, -math.inf])).tolist() == [0b010011]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="mask must be a boolean tensor, got torch.uint8"):
        pack_bits(torch.ones(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="x must be one of"):
        pack_sign(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="bits has 1 bytes; 9 elements go with 2"):
        unpack_bits(torch.zeros(1, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match="bits must be a contiguous uint8 vector"):
        unpack_bits(torch.zeros(2), 9)
    with pytest.raises(ValueError, match="value must be one number on cpu"):
        unpack_value(torch.zeros(2, dtype=torch.uint8), torch.ones(2), 9)
    with pytest.raises(ValueError, match="bits has 2 bytes; 8 elements go with 1"):
        mask_by_bits(torch.ones(8), torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bits set behind the last of 9 elements"):
        mask_by_bits(torch.ones(9), torch.full((2,), 255, dtype=torch.uint8))
