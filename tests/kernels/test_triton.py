"""The Triton kernels: equal to the reference (on a GPU, or interpreted), and compiled for targets that are not here."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import DTYPES, VALUES, assert_same, make, ratios, same_bits, strided_tensors

from surgeon_fx.kernels import (
    compress,
    decompress,
    mask_by_bits,
    pack_bits,
    pack_sign,
    pick,
    unavailable_reason,
    unpack_bits,
    unpack_value,
)

DEVICE = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    unavailable_reason("triton", DEVICE) != "", reason=unavailable_reason("triton", DEVICE) or "available"
)
TARGETS = Path(__file__).parents[2] / "bench" / "triton_targets.py"


def check(x, ratio):
    x = x.to(DEVICE)
    expected = compress(x, ratio, backend="reference")
    actual = compress(x, ratio, backend="triton")
    assert_same(actual, expected)
    assert same_bits(decompress(actual, backend="triton"), decompress(expected, backend="reference"))
    assert same_bits(pick(x, expected.bitmask, expected.kept, backend="triton"), expected.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_equals_reference(dtype, values):
    for size in (1, 65, 5000):
        for ratio in (0.3, 0.9):
            check(make(values, size, dtype), ratio)


@pytest.mark.parametrize("values", ["normal", "relu", "two", "special"])
def test_equals_reference_from_a_sampled_bracket(values):
    for dtype, ratio in ((torch.float32, 0.9), (torch.bfloat16, 0.5), (torch.float64, 0.99)):
        check(make(values, 70_001, dtype), ratio)


def test_equals_reference_when_large(monkeypatch):
    """So many blocks that they are counted in several rounds: beyond 2^22 elements, or with smaller rounds."""
    module = importlib.import_module("surgeon_fx.kernels.compress.triton")
    monkeypatch.setattr(module, "SCAN_BLOCK", 16)
    check(make("normal", 2**18 + 3, torch.float32), 0.9)


def test_a_misleading_sample_costs_time_only():
    n, size = 70_001, 4096
    i = torch.arange(size)
    seen = i * (n // size) + ((i + 1) * 2654435761 % 2**32 * (n // size) >> 32)
    far_above, far_below, all_inside = (make("normal", n, torch.float32) for _ in range(3))
    far_above[seen] = 1000
    far_below[seen] = 0
    all_inside[:] = far_above.abs().quantile(0.9) * (1 + torch.rand(n) * 0.01)
    all_inside[seen] = make("normal", size, torch.float32)
    for x in (far_above, far_below, all_inside):
        check(x, 0.9)


@settings(max_examples=25)
@given(x=strided_tensors(most=6000), ratio=ratios)
def test_equals_reference_for_any_layout(x, ratio):
    check(x, ratio)


@settings(max_examples=25)
@given(x=strided_tensors(most=6000))
def test_bits_equal_reference(x):
    x = x.to(DEVICE)
    assert torch.equal(pack_sign(x, backend="triton"), pack_sign(x, backend="reference"))
    mask = x.clone() > 0.5
    packed = pack_bits(mask, backend="triton")
    assert torch.equal(packed, pack_bits(mask, backend="reference"))
    assert torch.equal(unpack_bits(packed, mask.shape, mask.stride(), backend="triton"), mask)
    value = torch.tensor(1 / 3, dtype=x.dtype, device=DEVICE)
    restored = unpack_value(packed, value, mask.shape, mask.stride(), backend="triton")
    assert torch.equal(restored, torch.where(mask, value, 0.0))
    dense = x.clone()
    assert torch.equal(
        mask_by_bits(dense, packed, backend="triton").nan_to_num(), torch.where(mask, dense, 0.0).nan_to_num()
    )


def compile_for(*arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(TARGETS), *arguments, "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({row["kernel"] for row in rows}) >= 15
    assert not [row for row in rows if row["target"].startswith("sm_") and row["spill_bytes"] != 0]
    return {row["target"] for row in rows}


def test_compiles_without_a_gpu_and_without_spills():
    """The oldest and the newest; `bench/triton_targets.py` has all."""
    targets = ("sm_72", "sm_90", "sm_120", "gfx942")
    found = compile_for("--dtypes", "float32", "--integers", "i32", "--targets", *targets)
    assert found == set(targets)


def test_compiles_for_any_dtype_and_any_size_of_tensor():
    compile_for("--targets", "sm_80", "--dtypes", "bfloat16", "float64", "--integers", "i64")
