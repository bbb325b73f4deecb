"""A scale and a shift by channel at the kept places: as the dense affine, pruned by the same mask."""

import pytest
import torch

from surgeon_fx.kernels import compress, rescale
from surgeon_fx.kernels.rescale import reference

CASES = {
    "batch norm": ((3, 5, 7, 9), 63, 5),
    "large": ((4, 16, 50, 50), 2500, 16),
    "rows": ((6, 11, 37), 1, 37),
    "one channel": ((200,), 10, 1),
    "short runs": ((31, 13, 3), 3, 13),
}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense(case, with_bias, with_weight, ratio):
    shape, run, channels = CASES[case]
    x = torch.randn(shape)
    weight = torch.randn(channels) if with_weight else None
    bias = torch.randn(channels) if with_bias else None
    channel = torch.arange(x.numel()).div(run, rounding_mode="floor") % channels
    dense = x.view(-1) * (1 if weight is None else weight[channel]) + (0 if bias is None else bias[channel])
    kept = compress(x, ratio)
    keep = torch.zeros(x.numel(), dtype=torch.bool)
    keep[x.view(-1).abs().sort(descending=True, stable=True).indices[: kept.kept]] = True
    expected = dense[keep]
    torch.testing.assert_close(rescale(kept.values, kept.bitmask, x.numel(), run, weight, bias), expected)
    by_reference = reference.rescale(kept.values, kept.bitmask, x.numel(), run, weight, bias)
    torch.testing.assert_close(by_reference, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    x, weight, bias = torch.randn(4, 6, 50).to(dtype), torch.randn(6), torch.randn(6)
    kept = compress(x, 0.5)
    found = rescale(kept.values, kept.bitmask, x.numel(), 50, weight, bias)
    assert found.dtype is dtype
    torch.testing.assert_close(found, reference.rescale(kept.values, kept.bitmask, x.numel(), 50, weight, bias))


def test_any_number_of_threads():
    x, weight, bias = torch.randn(8, 32, 40, 40), torch.randn(32), torch.randn(32)
    kept = compress(x, 0.8)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            found.append(rescale(kept.values, kept.bitmask, x.numel(), 1600, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_bad_input_is_refused():
    kept = compress(torch.randn(4, 6, 50), 0.5)
    with pytest.raises(ValueError, match="do not come in runs of 50 for each of 7 channels"):
        rescale(kept.values, kept.bitmask, 1200, 50, torch.ones(7), None)
    with pytest.raises(ValueError, match="bitmask does not go with the values"):
        rescale(kept.values, torch.zeros_like(kept.bitmask), 1200, 50, torch.ones(6), None)


def test_runs_inside_a_compiler():
    kept = compress(torch.randn(4, 6, 50), 0.5)
    given = (kept.values, kept.bitmask, 1200, 50, torch.randn(6), torch.randn(6))
    torch.library.opcheck(torch.ops.surgeon_fx.rescale.default, given)
