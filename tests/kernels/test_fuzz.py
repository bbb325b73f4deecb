"""Random calls of every public kernel function, right and wrong; the C kernels under sanitizers.

SURGEON_FX_FUZZ_CASES sets how many cases the tests draw together; `bench/fuzz_kernels.py` runs them by the hundred
thousand.
"""

import os
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same, ratios, same_bits, strided_tensors
from native_harness import run, sanitized

from surgeon_fx.kernels import (
    Compressed,
    compress,
    decompress,
    mask_by_bits,
    native,
    pack_bits,
    pack_sign,
    unavailable_reason,
    unpack_bits,
    unpack_value,
)

CASES = int(os.environ.get("SURGEON_FX_FUZZ_CASES", "2000"))
BACKENDS = [b for b in ("torch", "cpu") if not unavailable_reason(b, "cpu")]
ISAS = [] if native.unavailable_reason() else native.instruction_sets()
EACH = CASES // 10
fuzz = settings(max_examples=EACH, deadline=None, suppress_health_check=list(HealthCheck), database=None)
no_tensor = st.sampled_from([None, 3, 0.5, "bits", [1, 2], (0,), b"\x01", object()])


@pytest.mark.parametrize("isa", ISAS)
def test_native_kernels_under_address_and_undefined_behaviour_sanitizers(isa):
    print(run(sanitized("address,undefined"), isa, 4 * EACH // len(ISAS), 1))


@pytest.mark.parametrize("isa", ISAS)
def test_native_kernels_while_their_input_changes(isa):
    print(run(sanitized("address,undefined"), isa, 2 * EACH // len(ISAS), 1, "racing"))


@pytest.mark.parametrize("isa", ISAS)
def test_native_kernels_under_thread_sanitizer(isa):
    print(run(sanitized("thread"), isa, EACH // len(ISAS), 1))


@fuzz
@given(x=strided_tensors(most=4000), ratio=ratios, backend=st.sampled_from(BACKENDS))
def test_every_function_does_what_the_reference_does(x, ratio, backend):
    c = compress(x, ratio, backend=backend)
    assert_same(c, compress(x, ratio, backend="reference"))
    restored = decompress(c, backend=backend)
    assert same_bits(restored, decompress(c, backend="reference"))
    assert restored.stride() == c.stride
    bits = pack_sign(x, backend=backend)
    assert torch.equal(bits, pack_sign(x, backend="reference"))
    assert torch.equal(bits, pack_bits(~(x <= 0), backend=backend))
    mask = unpack_bits(bits, c.shape, c.stride, backend=backend)
    assert torch.equal(mask, ~(x <= 0))
    value = torch.full((), 0.3, dtype=x.dtype)
    assert torch.equal(unpack_value(bits, value, c.shape, c.stride, backend=backend), torch.where(mask, value, 0.0))
    assert same_bits(mask_by_bits(x, bits, backend=backend), mask_by_bits(x, bits, backend="reference"))


@fuzz
@given(
    x=strided_tensors(most=3000),
    ratio=ratios,
    backend=st.sampled_from(BACKENDS),
    data=st.data(),
)
def test_wrong_arguments_get_a_clear_error(x, ratio, backend, data):
    c = compress(x, ratio, backend=backend)
    bits, value = pack_sign(x, backend=backend), torch.ones(1, dtype=x.dtype)
    parts = {"values": c.values, "bitmask": c.bitmask, "shape": c.shape, "stride": c.stride}
    with pytest.raises((TypeError, ValueError)):
        decompress(Compressed(**{**parts, **data.draw(broken_parts(c))}), backend=backend)
    wrong_bits, shape, stride = data.draw(broken_bits(bits, c))
    for unpack in (
        lambda: unpack_bits(wrong_bits, shape, stride, backend=backend),
        lambda: unpack_value(wrong_bits, value, shape, stride, backend=backend),
    ):
        with pytest.raises((TypeError, ValueError)):
            unpack()
    for wrong in (
        lambda: compress(data.draw(no_tensor), 0.5),
        lambda: compress(x, data.draw(st.sampled_from([-0.1, 1.1, float("nan"), None, "half"]))),
        lambda: compress(x.int() if data.draw(st.booleans()) else x > 0, 0.5),
        lambda: decompress(data.draw(no_tensor)),
        lambda: pack_sign(data.draw(no_tensor)),
        lambda: pack_sign(x.long()),
        lambda: pack_bits(data.draw(no_tensor)),
        lambda: pack_bits(x),
        lambda: unpack_value(bits, data.draw(no_tensor), c.shape),
        lambda: unpack_value(bits, torch.ones(2), c.shape),
        lambda: mask_by_bits(data.draw(no_tensor), bits),
        lambda: mask_by_bits(x, data.draw(no_tensor)),
    ):
        with pytest.raises((TypeError, ValueError)):
            wrong()


@st.composite
def broken_parts(draw, c):
    """One change that makes a Compressed invalid."""
    changes = [
        lambda: {"values": c.values[:-1] if c.kept > 1 else c.values.new_ones(c.numel + 1)},
        lambda: {"values": c.values.new_ones(c.numel + 1)},
        lambda: {"values": c.values.view(1, -1)},
        lambda: {"bitmask": torch.cat([c.bitmask, c.bitmask.new_zeros(1)])},
        lambda: {draw(st.sampled_from(["values", "bitmask"])): draw(no_tensor)},
        lambda: {"shape": (9,), "stride": (1,), "values": c.values.new_ones(10)},
        lambda: {"shape": (-1, *c.shape), "stride": (1, *c.stride)},
    ]
    if c.bitmask.numel():
        changes += [
            lambda: {"bitmask": flipped(c.bitmask, draw(st.integers(0, c.numel - 1)))},
            lambda: {"bitmask": c.bitmask.to(draw(st.sampled_from([torch.int32, torch.int8, torch.bool])))},
            lambda: {"bitmask": c.bitmask[:-1]},
            lambda: {"bitmask": c.bitmask.repeat(2)[::2] if c.bitmask.numel() > 1 else c.bitmask.view(1, 1)},
        ]
        changes.append(lambda: {"shape": (c.numel, 9), "stride": (9, 1)})
        if c.numel % 8:
            changes.append(lambda: {"bitmask": stray(c.bitmask)})
    if c.numel > 1:
        changes.append(lambda: {"stride": tuple(3 * step + 1 for step in c.stride)})
    return draw(st.sampled_from(changes))()


@st.composite
def broken_bits(draw, bits, c):
    """Bits, shape and stride that do not go together."""
    changes = [
        lambda: (draw(no_tensor), c.shape, c.stride),
        lambda: (torch.cat([bits, bits.new_zeros(1)]), c.shape, c.stride),
        lambda: (bits.to(draw(st.sampled_from([torch.int8, torch.int64, torch.bool]))), c.shape, c.stride),
        lambda: (bits, (-1, *c.shape), None),
    ]
    if c.numel:
        changes += [lambda: (bits[:-1], c.shape, c.stride), lambda: (bits, (*c.shape, 9), None)]
    if c.numel > 1:
        changes.append(lambda: (bits, c.shape, tuple(3 * step + 1 for step in c.stride)))
    if c.numel % 8:
        changes.append(lambda: (stray(bits), c.shape, c.stride))
    return draw(st.sampled_from(changes))()


def flipped(bits, at):
    bits = bits.clone()
    bits[at // 8] ^= 1 << at % 8
    return bits


def stray(bits):
    bits = bits.clone()
    bits[-1] |= 0x80
    return bits


@fuzz
@given(x=strided_tensors(most=2000), backend=st.sampled_from(BACKENDS), at=st.integers(0, 40))
def test_inputs_that_share_memory_are_read_alike(x, backend, at):
    """A mask that lies inside the values, bits that lie inside the tensor."""
    c = compress(x, 0.7, backend=backend)
    if c.bitmask.numel():
        shared = torch.empty(c.values.nbytes + c.bitmask.numel() + 64, dtype=torch.uint8)
        shared[: c.values.nbytes] = c.values.view(torch.uint8)
        bitmask = shared[c.values.nbytes :][: c.bitmask.numel()]
        bitmask.copy_(c.bitmask)
        together = Compressed(shared[: c.values.nbytes].view(x.dtype), bitmask, c.shape, c.stride)
        assert same_bits(decompress(together, backend=backend), decompress(c, backend="reference"))
    bits = x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)[at:]
    count = 8 * bits.numel()
    assert torch.equal(unpack_bits(bits, count, backend=backend), unpack_bits(bits.clone(), count, backend="reference"))


@pytest.mark.skipif(not ISAS, reason="no C kernels here")
def test_what_compress_returns_goes_together_though_its_input_changes():
    x, stop = torch.randn(300_001), threading.Event()
    other = torch.randn(300_001) * 100

    def disturb():
        while not stop.is_set():
            x.copy_(other)
            x.zero_()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for i in range(200):
            c = compress(x, (0.1, 0.5, 0.9, 0.99)[i % 4])
            restored = decompress(c)  # refuses a mask that does not have as many bits as there are values
            assert restored.shape == x.shape
    finally:
        stop.set()
        thread.join()
