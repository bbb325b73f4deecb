"""8-bit codes: what they mean by hand, every backend equal to the reference in every bit, errors bounded."""

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import DTYPES, VALUES, make, same_bits, strided_tensors

from surgeon_fx.kernels import dequantize, quantize, quantized_bytes, unavailable_reason
from surgeon_fx.kernels.layout import flatten

BACKENDS = [b for b in ("torch", "cpu", "triton") if not unavailable_reason(b, "cpu")]


def same(a, b):
    """Equal in every bit, apart from the payload of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(7.5), b.nan_to_num(7.5))


def check(x, backend):
    codes, scales = quantize(x, backend=backend)
    expected, expected_scales = quantize(x, backend="reference")
    assert torch.equal(codes, expected)
    assert same(scales, expected_scales)
    assert codes.nbytes + scales.nbytes == quantized_bytes(x.numel(), x.dtype)
    back = dequantize(codes, scales, x.dtype, backend=backend)
    assert same(back, dequantize(codes, scales, x.dtype, backend="reference"))
    return back


def test_by_hand():
    x = torch.zeros(130)
    x[:6] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -2.5])
    x[64], x[65] = 254.0, -3.0
    x[128] = math.inf
    codes, scales = quantize(x)
    assert scales[:2].tolist() == [1.0, 2.0]
    assert scales[2].isnan()
    assert codes[:6].tolist() == [127, -127, 0, 2, 2, -2]  # ties to even
    assert codes[64:66].tolist() == [127, -2]
    back = dequantize(codes, scales, x.dtype)
    assert back[:6].tolist() == [127.0, -127.0, 0.0, 2.0, 2.0, -2.0]
    assert back[128:].isnan().all()  # an infinity takes its block along, and no other
    assert not back[:128].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_equals_reference(backend, dtype, values):
    for size in (0, 1, 63, 64, 65, 5000):
        check(make(values, size, dtype), backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_any_number_of_threads(backend, dtype):
    x = make("normal", 300_001, dtype)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            check(x, backend)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(x=strided_tensors(most=5000))
def test_any_layout_and_half_a_step_of_error(backend, x):
    back = check(x, backend)
    flat = flatten(x.clone())
    n, wide = flat.numel(), torch.float64 if x.dtype is torch.float64 else torch.float32
    blocks = torch.nn.functional.pad(flat, (0, -n % 64)).to(wide).view(-1, 64)
    sound = blocks.isfinite().all(1).repeat_interleave(64)[:n]
    assert torch.equal(back.isnan(), ~sound)
    assert torch.equal(back[sound & (flat == 0)], flat[sound & (flat == 0)].abs())
    error = (back.to(wide) - flat.to(wide)).abs()[sound]
    step = blocks.abs().amax(1).repeat_interleave(64)[:n][sound] / 127 if n else error
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(x.dtype, 1e-6)
    slack = flat.to(wide).abs()[sound] * rounding + 254 * torch.finfo(x.dtype).tiny
    assert (error <= step * 0.5 + slack).all()


@pytest.mark.parametrize("sanitizers", ["address,undefined", "address,undefined -O3"])
def test_c_stays_within_its_blocks(tmp_path, sanitizers):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    sources = Path(__file__).parents[2] / "kernels" / "native"
    flags = f"-std=gnu11 -O1 -g -fopenmp -fno-sanitize-recover=all -fno-sanitize=alignment -fsanitize={sanitizers}"
    files = [Path(__file__).parent / "quantize_check.c", sources / "quantize.c", sources / "rescale.c"]
    command = ["gcc", *flags.split(), f"-I{sources}", *map(str, files), "-o", str(tmp_path / "check"), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip("gcc has no sanitizers or no OpenMP here")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stdout + result.stderr


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="x must be one of"):
        quantize(torch.ones(3, dtype=torch.int64))
    codes, scales = quantize(torch.randn(100))
    with pytest.raises(ValueError, match="codes must be a contiguous int8 vector"):
        dequantize(codes.float(), scales, torch.float32)
    with pytest.raises(ValueError, match=r"scales must be a contiguous torch.float64 vector"):
        dequantize(codes, scales, torch.float64)
    with pytest.raises(ValueError, match="100 codes on cpu go with 2"):
        dequantize(codes, scales[:1], torch.float32)


def test_runs_inside_a_compiler():
    torch.library.opcheck(torch.ops.surgeon_fx.quantize.default, (torch.randn(3, 70),))
    codes, scales = quantize(torch.randn(210))
    torch.library.opcheck(torch.ops.surgeon_fx.dequantize.default, (codes, scales, torch.float32))
