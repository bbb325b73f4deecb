"""Compression of a normalised input, against compression of the dense one."""

import pytest
import torch
from kernel_cases import VALUES, assert_same, make
from torch.library import opcheck

from surgeon_fx.kernels import compress, compress_normalised, native
from surgeon_fx.kernels.compress.normalised import compress_normalised_pays, normalise

ISAS = native.instruction_sets() if not native.unavailable_reason() else []
SHAPES = [
    (4, 6, 8, 8),
    (3, 5, 7, 7),
    (2, 3, 33, 35),
    (16, 16, 40, 40),
    (5, 7, 130),
    (33, 5),
    (2, 3, 4, 5, 6),
    (3, 70_001),
]
needs_c = pytest.mark.skipif(not ISAS, reason="no C kernels here")


def statistics(x, by):
    count = x.shape[1] if by == "channel" else x.numel() // x.shape[-1]
    return torch.randn(count), torch.rand(count) + 0.1


def check(x, mean, rstd, by, ratio):
    hat = normalise(x, mean, rstd, by)
    found, expected = compress_normalised(x, mean, rstd, by, ratio), compress(hat, ratio, backend="reference")
    assert torch.equal(found.bitmask, expected.bitmask)
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert (found.shape, found.stride) == (tuple(x.shape), x.stride())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by", ["channel", "row"])
def test_equals_compress_of_the_dense_tensor(isa, shape, by):
    torch.manual_seed(0)
    x = torch.randn(shape)
    with native.forced_instruction_set(isa):
        for ratio in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0):
            check(x, *statistics(x, by), by, ratio)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(2, 16, 33, 35), (3, 70, 9, 9), (1, 64, 70, 70), (2, 33, 4, 5, 6), (5, 1000, 3, 3)])
def test_channels_that_lie_side_by_side(isa, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    mean, rstd = statistics(x, "channel")
    assert compress_normalised_pays(x, mean, "channel")
    with native.forced_instruction_set(isa):
        for ratio in (0.1, 0.5, 0.9, 0.999):
            check(x, mean, rstd, "channel", ratio)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("by", ["channel", "row"])
def test_values_that_are_hard_to_order(values, by):
    x = make(values, 6 * 5 * 3000, torch.float32).view(6, 5, 3000)
    mean, rstd = statistics(x, by)
    for ratio in (0.3, 0.9):
        check(x, mean, rstd, by, ratio)
        check(x, torch.zeros_like(mean), torch.ones_like(rstd), by, ratio)
    mean[1], rstd[2], rstd[3] = torch.nan, torch.inf, 0
    check(x, mean, rstd, by, 0.9)


@needs_c
def test_any_number_of_threads_gives_the_same_bits():
    x = torch.randn(8, 24, 40, 41)
    mean, rstd = statistics(x, "channel")
    before, results = torch.get_num_threads(), []
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            results.append(compress_normalised(x, mean, rstd, "channel", 0.9))
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert_same(found, results[0])


@pytest.mark.parametrize("by", ["channel", "row"])
def test_other_layouts_and_types_are_as_exact(by):
    x = torch.randn(4, 6, 9, 10)
    last = x.to(memory_format=torch.channels_last)
    mean, rstd = statistics(x, by)
    check(last, mean, rstd, by, 0.7)
    check(x.double(), mean.double(), rstd.double(), by, 0.7)
    check(x.bfloat16(), mean, rstd, by, 0.7)
    check(x, mean.repeat(2)[::2].contiguous(), rstd.repeat_interleave(2)[::2], by, 0.7)
    assert not compress_normalised_pays(last, mean, by)  # too few channels, or rows that are not in one piece
    assert not compress_normalised_pays(x.bfloat16(), mean, by)


@needs_c
def test_pays_for_long_runs_of_float32():
    assert compress_normalised_pays(torch.empty(4, 6, 4, 4), torch.empty(6), "channel")
    assert not compress_normalised_pays(torch.empty(4, 6, 3, 5), torch.empty(6), "channel")
    assert compress_normalised_pays(torch.empty(40, 16), torch.empty(16), "channel")
    assert not compress_normalised_pays(torch.empty(40, 15), torch.empty(15), "channel")
    assert compress_normalised_pays(torch.empty(4, 6, 16), torch.empty(4, 6), "row")
    assert not compress_normalised_pays(torch.empty(4, 6, 15), torch.empty(4, 6), "row")


def test_statistics_that_do_not_fit_are_refused():
    x, one = torch.randn(4, 6, 10), torch.ones(6)
    for arguments, message in (
        ((one[:5], one[:5], "channel"), "one element for each channel of"),
        ((one, one[:5], "channel"), "as many elements as each other, got 6 and 5"),
        ((torch.ones(7), torch.ones(7), "row"), "is not 7 equal rows"),
        ((one, one, "column"), 'by must be "channel" or "row", got \'column\''),
    ):
        with pytest.raises(ValueError, match=message):
            compress_normalised(x, *arguments, 0.5)


def test_the_op_is_what_its_fake_says():
    x = torch.randn(3, 5, 70)
    op = torch.ops.surgeon_fx.compress_normalised.default
    opcheck(op, (x, torch.randn(5), torch.rand(5), "channel", 0.9))
    opcheck(op, (x, torch.randn(3, 5), torch.rand(3, 5), "row", 0.0))
