"""What a caller can get wrong ends in an error or in an unspecified tensor, never past the end of a buffer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DTYPES
from native_harness import run, sanitized

from surgeon_fx.kernels import Compressed, compress, decompress, native, pack_bits, unavailable_reason, unpack_bits
from surgeon_fx.kernels import unpack_value as unpack

BACKENDS = [b for b in ("reference", "torch", "cpu") if not unavailable_reason(b, "cpu")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 65, 40_001])
def test_bits_behind_the_last_element_are_refused(backend, dtype, size):
    bits = pack_bits(torch.ones(size, dtype=torch.bool))
    bits[-1] = 255
    with pytest.raises(ValueError, match=f"bits set behind the last of {size} elements"):
        unpack(bits, torch.ones(1, dtype=dtype), size, backend=backend)
    with pytest.raises(ValueError, match=f"bits set behind the last of {size} elements"):
        unpack_bits(bits, size, backend=backend)


@pytest.mark.parametrize("wrong", [None, [1, 2], "bits", 7])
def test_what_is_no_tensor_is_a_type_error(wrong):
    c = compress(torch.randn(20), 0.5)
    for call in (
        lambda: unpack_bits(wrong, 20),
        lambda: unpack(wrong, torch.ones(1), 20),
        lambda: unpack(pack_bits(torch.ones(20).bool()), wrong, 20),
        lambda: pack_bits(wrong),
        lambda: decompress(Compressed(c.values, wrong, c.shape, c.stride)),
        lambda: decompress(Compressed(wrong, c.bitmask, c.shape, c.stride)),
        lambda: decompress(wrong),
    ):
        with pytest.raises(TypeError, match=f"must be .*got {type(wrong).__name__}"):
            call()


@pytest.mark.parametrize("stride", [(1, 7), (6, 2), (-6, 1), (1,)])
def test_strides_of_no_dense_layout_are_refused(stride):
    bits = pack_bits(torch.ones(4, 6).bool())
    with pytest.raises(ValueError, match="stride must be of a dense layout of shape"):
        unpack_bits(bits, (4, 6), stride)
    c = compress(torch.randn(4, 6), 0.5)
    with pytest.raises(ValueError, match="stride must be of a dense layout of shape"):
        decompress(Compressed(c.values, c.bitmask, c.shape, stride))


@pytest.mark.skipif(bool(native.unavailable_reason()), reason="no C kernels here")
@pytest.mark.parametrize("isa", native.instruction_sets() if not native.unavailable_reason() else [])
def test_large_outputs_need_no_alignment(isa):
    """In a process of its own: a streamed store to a misaligned address ends it."""
    code = f"""
import torch
from surgeon_fx.kernels import native, pack_bits
n = (1 << 21) + 1000
keep = torch.rand(n) > 0.5
bits, out = pack_bits(keep), torch.empty(n + 1)[1:]
with native.forced_instruction_set({isa!r}):
    assert native.library().sfx_select(bits.data_ptr(), n, 4, None, 0x3f800000, out.data_ptr(), 2) == 0
assert torch.equal(out, keep.float())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(bool(native.unavailable_reason()), reason="no C kernels here")
@pytest.mark.parametrize("isa", native.instruction_sets() if not native.unavailable_reason() else [])
def test_counts_of_an_earlier_pass_are_not_trusted(isa):
    """Version 0.1 wrote past the values within a few rounds; lists of a weight gradient could be written over."""
    run(sanitized("address,undefined", source=Path(__file__).with_name("changing_input.c")), isa, 40)
