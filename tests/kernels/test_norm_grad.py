"""Gradients of norms from a pruned normalised input, against the native backward over the restored one."""

import pytest
import torch

from surgeon_fx.kernels import compress, native
from surgeon_fx.kernels.norm_grad import batch_norm_grad, layer_norm_grad, norm_grad_pays, reference

ISAS = native.instruction_sets() if not native.unavailable_reason() else []
SHAPES = [
    (4, 6, 8, 8),
    (3, 5, 7, 7),
    (2, 150, 5, 5),
    (2, 3, 33, 35),
    (16, 16, 32, 32),
    (1, 2, 4, 4),
    (5, 7, 130),
    (2, 3, 4, 5, 6),
]

pytestmark = pytest.mark.skipif(not ISAS, reason="no C kernels here")


def check(function, *arguments):
    """Against the reference in double precision."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    expected = getattr(reference, function.__name__)(*wide)
    for x, y in zip(function(*arguments), expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-6 * arguments[0].numel() ** 0.5 + 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.999])
def test_equals_the_native_backward_over_the_restored_input(isa, shape, ratio):
    torch.manual_seed(0)
    grad, c = torch.randn(shape), compress(torch.randn(shape), ratio)
    scale, weight, rstd = torch.randn(shape[1]), torch.randn(shape[-1]), torch.rand(shape[:-1])
    with native.forced_instruction_set(isa):
        check(batch_norm_grad, grad, c.values, c.bitmask, scale)
        check(layer_norm_grad, grad, c.values, c.bitmask, weight, rstd)
        check(layer_norm_grad, grad, c.values, c.bitmask, None, rstd)


def test_any_number_of_threads_gives_the_same_bits():
    shape = (8, 24, 40, 40)
    grad, c = torch.randn(shape), compress(torch.randn(shape), 0.8)
    scale, weight, rstd = torch.rand(24), torch.rand(40), torch.rand(shape[:-1])
    before, results = torch.get_num_threads(), []
    try:
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            results.append(
                (
                    *batch_norm_grad(grad, c.values, c.bitmask, scale),
                    *layer_norm_grad(grad, c.values, c.bitmask, weight, rstd),
                )
            )
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found, results[0], strict=True))


def test_what_does_not_go_together_is_refused():
    grad, c = torch.randn(2, 4, 8, 8), compress(torch.randn(2, 4, 8, 8), 0.5)
    flipped = c.bitmask.clone()
    flipped[3] ^= 4
    for bitmask, message in ((flipped, "bit"), (c.bitmask[1:], "bitmask has 63 bytes")):
        with pytest.raises(ValueError, match=message):
            batch_norm_grad(grad, c.values, bitmask, torch.ones(4))
        with pytest.raises(ValueError, match=message):
            layer_norm_grad(grad, c.values, bitmask, None, torch.ones(2, 4, 8))
    with pytest.raises(ValueError, match="one element for each channel"):
        batch_norm_grad(grad, c.values, c.bitmask, torch.ones(5))
    with pytest.raises(ValueError, match="rows of the weight's size"):
        layer_norm_grad(grad, c.values, c.bitmask, torch.ones(7), torch.ones(2, 4, 8))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_all_or_nothing_kept_has_no_mask_to_read(ratio):
    grad, c = torch.randn(2, 4, 8, 8), compress(torch.randn(2, 4, 8, 8), ratio)
    assert not c.bitmask.numel()
    check(batch_norm_grad, grad, c.values, c.bitmask, torch.rand(4))
    check(layer_norm_grad, grad, c.values, c.bitmask, torch.rand(8), torch.rand(2, 4, 8))


def test_an_empty_batch():
    grad, bitmask = torch.zeros(0, 4, 8, 8), torch.zeros(0, dtype=torch.uint8)
    dx, dw, db = batch_norm_grad(grad, grad.flatten(), bitmask, torch.ones(4))
    assert dx.shape == grad.shape
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_never_reach_kernels_that_read_float32(dtype):
    """Read and written as float32, a bfloat16 scale would be overrun by both."""
    shape = (4, 64, 32, 32)
    grad, c = torch.randn(shape), compress(torch.randn(shape), 0.5)
    scale, weight, rstd = torch.rand(64), torch.rand(32), torch.rand(shape[:-1])
    check_values = batch_norm_grad(grad, c.values.to(dtype), c.bitmask, scale)
    for x, y in zip(check_values, batch_norm_grad(grad, c.values, c.bitmask, scale), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.5)
    for wrong in (
        lambda: batch_norm_grad(grad, c.values, c.bitmask, scale.to(dtype)),
        lambda: layer_norm_grad(grad, c.values, c.bitmask, weight.to(dtype), rstd),
        lambda: layer_norm_grad(grad, c.values, c.bitmask, weight, rstd.to(dtype)),
    ):
        with pytest.raises(RuntimeError, match="scalar type"):
            wrong()


def test_pays_for_float32_on_a_cpu():
    c = compress(torch.randn(4096), 0.5)
    assert norm_grad_pays(c.values, c.bitmask, 64)
    assert not norm_grad_pays(c.values, c.bitmask, 1)
    assert not norm_grad_pays(c.values.bfloat16(), c.bitmask, 64)
    assert not norm_grad_pays(c.values, c.bitmask[:0], 64)
