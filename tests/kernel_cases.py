"""Tensors that are hard to compress right, and how to compare bits."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from surgeon_fx.kernels import layout

DTYPES = tuple(layout.FLOAT_BITS)
SIZES = (0, 1, 7, 8, 63, 64, 65, 1000, 8200, 70_001)
LARGE = 2**20 + 3
RATIOS = (0.001, 0.5, 0.9, 0.999)


def normal(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def special(n: int) -> Tensor:
    x = normal(n)
    x[::3] = math.nan
    x[1::5] = -math.inf
    x[2::7] = -0.0
    x[3::11] = 1e-310
    return x


VALUES = {
    "normal": normal,
    "relu": lambda n: normal(n).relu(),
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
    "equal": lambda n: torch.full((n,), -1.5, dtype=torch.float64),
    "two": lambda n: (normal(n) > 0).double() + 1,
    "few": lambda n: (normal(n) * 2).round(),
    "sorted": lambda n: normal(n).sort().values,
    "special": special,
    "all_nan": lambda n: torch.full((n,), math.nan, dtype=torch.float64),
    "subnormal": lambda n: normal(n) * 1e-310,
}


def make(values: str, n: int, dtype: torch.dtype) -> Tensor:
    x = VALUES[values](n).to(dtype)
    if values in ("special", "subnormal"):  # subnormals and NaN payloads of this dtype, which a cast would lose
        bits = layout.FLOAT_BITS[dtype]
        x.view(bits.integer)[5::13] = 3
        x.view(bits.integer)[6::17] = bits.inf + 2
    return x


@st.composite
def strided_tensors(draw: st.DrawFn, most: int = 20_000) -> Tensor:
    """A float tensor of any shape and layout: permuted, sliced with steps, expanded, or a view into the middle."""
    values = draw(st.sampled_from(sorted(VALUES)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 40), min_size=0, max_size=4).filter(lambda s: math.prod(s) <= most))
    if draw(st.booleans()):
        shape = [draw(st.integers(0, most))]
    x = make(values, math.prod(shape) + 5, dtype)[draw(st.integers(0, 5)) :][: math.prod(shape)].view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        x = x[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        x = x.unsqueeze(0).expand(2, *x.shape)
    return x


ratios = st.one_of(st.sampled_from((0.0, 0.5, 0.9, 1.0)), st.floats(0, 1))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, so that -0.0 and NaN payloads count."""
    integer = layout.FLOAT_BITS[a.dtype].integer
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


def assert_same(actual: object, expected: object) -> None:
    """Two Compressed, equal in every bit."""
    assert same_bits(actual.values, expected.values)
    assert torch.equal(actual.bitmask, expected.bitmask)
    assert (actual.shape, actual.stride) == (expected.shape, expected.stride)
