"""Choosing a backend, and the ops behind the functions."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from surgeon_fx import kernels
from surgeon_fx.kernels import (
    BackendUnavailable,
    backends,
    compress,
    decompress,
    native,
    pack_bits,
    pack_sign,
    unpack_bits,
)

ops = torch.ops.surgeon_fx


def fresh(monkeypatch):
    for cached in (backends.unavailable_reason, backends.active_backend, backends.implementation):
        cached.cache_clear()
        monkeypatch.setattr(backends, cached.__name__, cached.__wrapped__)


def test_auto_is_native_where_it_was_built():
    assert kernels.active_backend("cpu") == ("torch" if native.unavailable_reason() else "cpu")
    assert kernels.active_backend("mps") == "torch"


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend must be one of auto, reference, torch, cpu, triton, got 'cuda'"):
        compress(torch.ones(3), 0.5, backend="cuda")


def test_without_the_library_torch_takes_over_and_the_reason_is_given(monkeypatch):
    fresh(monkeypatch)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the C kernels were not built: no gcc")
    assert backends.active_backend("cpu") == "torch"
    with pytest.raises(BackendUnavailable, match="'cpu' is not available: the C kernels were not built: no gcc"):
        backends.implementation("compress", "cpu", "cpu")


def test_without_triton_the_reason_is_given(monkeypatch):
    fresh(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="triton is not installed"):
        backends.implementation("compress", "triton", "cuda")
    assert backends.active_backend("cuda") == "torch"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    fresh(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="set TRITON_INTERPRET=1 before import"):
        backends.implementation("compress", "triton", "cpu")


def test_missing_library_names_the_failed_build(tmp_path, monkeypatch):
    note = tmp_path / "build_failure.txt"
    note.write_text("-fopenmp: command 'gcc' failed\n")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(native, "FAILURE_NOTE", note)
    lib, reason = native._load.__wrapped__()
    assert lib is None
    assert "command 'gcc' failed" in reason


def test_broken_library_is_reported_not_raised(tmp_path, monkeypatch):
    broken = tmp_path / "prune_pack.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    assert "did not load" in native._load.__wrapped__()[1]


def test_import_needs_no_optional_package():
    code = (
        "import sys, torch; before = set(sys.modules); import surgeon_fx;"
        "new = set(sys.modules) - before;"
        "assert not new & {'triton', 'timm', 'torchvision', 'matplotlib', 'tabulate'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


X = torch.randn(4, 6, 5, 7)
COMPRESSED = compress(X, 0.6)
PARTS = (COMPRESSED.values, COMPRESSED.bitmask, COMPRESSED.shape, COMPRESSED.stride)


@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_ops_are_not_differentiable(backend, ratio):
    x = torch.randn(100, requires_grad=True)
    values, bitmask = ops.compress(x, ratio, backend)
    assert not values.requires_grad
    assert not ops.decompress(values.requires_grad_(), bitmask, (100,), (1,), backend).requires_grad


def test_ops_check_what_they_are_given():
    for op in (ops.compress, ops.pack_sign, ops.pack_bits):
        arguments = (torch.ones(9, dtype=torch.int64), *([0.5] if op is ops.compress else []))
        with pytest.raises(ValueError, match="must be"):
            op(*arguments)
        with pytest.raises(ValueError, match="must be"):
            op(arguments[0].to("meta"), *arguments[1:])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (ops.compress, (X, 0.6)),
        (ops.compress, (X.contiguous(memory_format=torch.channels_last).bfloat16(), 0.25, "torch")),
        (ops.compress, (X, 0.0)),
        (ops.compress, (X[:, ::2], 1.0)),
        (ops.decompress, PARTS),
        (ops.decompress, (*PARTS, "reference")),
        (ops.pick, (X, COMPRESSED.bitmask, COMPRESSED.kept)),
        (ops.pack_bits, (X > 0,)),
        (ops.pack_sign, (X,)),
        (ops.unpack_bits, (pack_bits(X > 0), X.numel())),
        (ops.unpack_value, (pack_bits(X > 0), X.numel(), torch.ones(1))),
        (ops.mask_by_bits, (X, pack_bits(X > 0))),
        (ops.batch_norm_grad, (X, *PARTS[:2], torch.ones(X.shape[1]))),
        (ops.layer_norm_grad, (X, *PARTS[:2], torch.ones(X.shape[-1]), torch.ones(X.shape[:-1]))),
    ],
)
def test_opcheck(op, arguments):
    opcheck(op.default, arguments)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_runs_inside_a_compiled_graph(layout):
    def round_trip(x):
        c = compress(x * 2, 0.75)
        bits = pack_sign(x)
        return decompress(c) + 1, c.values, unpack_bits(bits, x.shape, x.stride())

    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True)
    for batch in (4, 4, 6):
        x = torch.randn(batch, 6, 5, 7).contiguous(memory_format=layout)
        for actual, expected in zip(compiled(x), round_trip(x), strict=True):
            assert torch.equal(actual, expected)
            assert actual.stride() == expected.stride()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_kernels_write_is_on_the_device_of_what_they_read(device):
    """Whatever the default: a kernel is given addresses."""
    x = torch.randn(40, 40, device="cpu")
    with torch.device(device):
        c = kernels.compress(x, 0.5)
        found = [c.values, c.bitmask, kernels.decompress(c), *kernels.quantize(x), kernels.pack_sign(x)]
        found += [kernels.unpack_bits(found[-1], x.shape), kernels.mask_by_bits(x, found[-1])]
        found += [kernels.dequantize(*kernels.quantize(x), x.dtype)]
    assert all(one.device.type == "cpu" for one in found)
    assert torch.equal(found[2], kernels.decompress(kernels.compress(x, 0.5)))
