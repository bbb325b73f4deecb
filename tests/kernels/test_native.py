"""The C kernels: every instruction set, any number of threads, the fallback, and memory."""

import importlib
import shutil
from functools import lru_cache

import pytest
import torch
from kernel_cases import DTYPES, LARGE, VALUES, assert_same, make, same_bits
from native_harness import build, run

from surgeon_fx.kernels import (
    compress,
    compress_normalised,
    decompress,
    native,
    pack_bits,
    pack_sign,
    unpack_bits,
    unpack_value,
)

if native.unavailable_reason():
    pytest.skip(native.unavailable_reason(), allow_module_level=True)

cpu = importlib.import_module("surgeon_fx.kernels.compress.cpu")


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@lru_cache(maxsize=3 * len(VALUES))  # of one dtype
def reference(values, size, ratio, dtype):
    """An input, what the reference makes of it, what that is restored to, and the input's signs."""
    x = make(values, size, dtype)
    compressed = compress(x, ratio, backend="reference")
    return x, compressed, decompress(compressed, backend="reference"), pack_sign(x, backend="reference")


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_every_instruction_set_and_thread_count(isa, dtype, threads):
    for values in VALUES:
        for size, ratio in ((1000, 0.5), (70_001, 0.9), (300_000, 0.3)):
            x, expected, restored, signs = reference(values, size, ratio, dtype)
            with native.forced_instruction_set(isa):
                actual = compress(x, ratio, backend="cpu")
                assert_same(actual, expected)
                assert same_bits(decompress(actual), restored)
                assert torch.equal(pack_sign(x), signs)
                assert torch.equal(unpack_bits(pack_bits(x > 0), size), x > 0)
                filled = unpack_value(pack_bits(x > 0), torch.full((), 0.3, dtype=dtype), size)
                assert torch.equal(filled, torch.where(x > 0, torch.full((), 0.3, dtype=dtype), 0.0))


def test_same_bits_every_time():
    x = make("normal", LARGE, torch.float32)
    first = compress(x, 0.9)
    for _ in range(10):
        assert_same(compress(x, 0.9), first)


def sampled_positions(n: int) -> torch.Tensor:
    """Where prune_pack.c looks to guess the threshold."""
    size = min(int(n ** (2 / 3) / 2), 1 << 18)
    stride = n // size
    positions = []
    for i in range(size):
        h = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        h = (h ^ h >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >> 32
        positions.append(i * stride + (h * stride >> 32))
    return torch.tensor(positions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_a_misleading_sample_costs_time_only(dtype, ratio, threads):
    n = 200_000
    seen = sampled_positions(n)
    far_above, far_below, all_inside = (make("normal", n, dtype) for _ in range(3))
    far_above[seen] = 1000
    far_below[seen] = 0
    quantile = far_above.float().abs().quantile(ratio).to(dtype)
    all_inside[:] = quantile * (1 + torch.rand(n) * 0.01).to(dtype)
    all_inside[seen] = make("normal", len(seen), dtype)
    for x in (far_above, far_below, all_inside):
        expected = compress(x, ratio, backend="reference")
        assert_same(compress(x, ratio), expected)
        rows = x.view(40, -1)  # a mean of 0 and a deviation of 1
        found = compress_normalised(rows, torch.zeros(40), torch.ones(40), "row", ratio)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.bitmask, expected.bitmask)


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_restored_tensors_bypass_the_cache(isa, dtype):
    x = make("normal", (1 << 23) // dtype.itemsize + 77, dtype)  # past STREAM_BYTES
    c = compress(x, 0.9)
    touched = torch.full_like(x, torch.nan)
    with native.forced_instruction_set(isa):
        cpu.decompress_into(c.values, c.bitmask, touched)
    assert same_bits(touched, decompress(c, backend="reference"))


def test_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="no 'mmx' here; this machine has"), native.forced_instruction_set("mmx"):
        pass


@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_memory(offset):
    x = make("normal", 100_000, torch.float32)[offset:]
    assert_same(compress(x, 0.9), compress(x.clone(), 0.9))


def test_neon_under_emulation():
    emulator = shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("needs qemu-aarch64 (Debian: qemu-user)")
    run(emulator, build("-static", compiler="aarch64-linux-gnu-gcc"), "neon", 300, 1)
