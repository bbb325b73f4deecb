"""Loads the C kernels that the package's build left beside this file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch  # first: it brings the OpenMP runtime that the library's symbols resolve to

HERE = Path(__file__).parent
LIBRARY = HERE / "prune_pack.so"
FAILURE_NOTE = HERE / "build_failure.txt"  # written by setup.py

SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "sfx_isa": (c_char_p, [c_int]),
    "sfx_set_isa": (c_int, [c_char_p]),
    "sfx_openmp": (c_int, []),
    # x, n, width, inf, kept, values, mask, threads
    "sfx_compress": (c_int, [c_void_p, c_int64, c_int64, c_uint64, c_int64, c_void_p, c_void_p, c_int]),
    # x, n, mean, rstd, length, groups, kept, values, mask, threads
    "sfx_compress_normalised": (
        c_int,
        [c_void_p, c_int64, *(c_void_p,) * 2, *(c_int64,) * 3, *(c_void_p,) * 2, c_int],
    ),
    # values, kept, mask, n, width, out, threads
    "sfx_decompress": (c_int, [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int]),
    # x, n, width, mask, kept, values, threads
    "sfx_pick": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int]),
    # x, n, width, inf, bits, threads
    "sfx_pack_sign": (None, [c_void_p, c_int64, c_int64, c_uint64, c_void_p, c_int]),
    # mask, n, bits, threads
    "sfx_pack_bits": (None, [c_void_p, c_int64, c_void_p, c_int]),
    # bits, n, mask, threads
    "sfx_unpack_bits": (c_int, [c_void_p, c_int64, c_void_p, c_int]),
    # bits, n, width, x, value, out, threads
    "sfx_select": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_uint64, c_void_p, c_int]),
    # x, batch, channels, plane, weight, bias, running mean and variance, momentum, eps, fused, mean, rstd, y, threads
    "sfx_batch_norm": (
        None,
        [c_void_p, *(c_int64,) * 3, *(c_void_p,) * 4, c_float, c_double, c_int, *(c_void_p,) * 3, c_int],
    ),
    # g, values, kept, mask, batch, channels, plane, scale, dx, dw, db, threads
    "sfx_batch_norm_grad": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_void_p, *(c_int64,) * 3, *(c_void_p,) * 4, c_int],
    ),
    # g, values, kept, mask, rows, n, w, rstd, dx, dw, db, threads
    "sfx_layer_norm_grad": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_void_p, *(c_int64,) * 2, *(c_void_p,) * 5, c_int],
    ),
    # g, values, kept, mask, sizes, dw, threads
    "sfx_weight_grad": (c_int, [c_void_p, c_void_p, c_int64, c_void_p, POINTER(c_int64), c_void_p, c_int]),
    # x, n, kind, codes, scales, threads
    "sfx_quantize": (c_int, [c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]),
    # codes, scales, n, kind, out, threads
    "sfx_dequantize": (c_int, [c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int]),
    # values, kept, mask, n, run, channels, weight, bias, out, threads
    "sfx_rescale": (c_int, [c_void_p, c_int64, c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int]),
    "sfx_blocks_check": (c_int, []),
    "sfx_blocks_install": (c_int, []),
    "sfx_blocks_trim": (c_int64, [c_int64]),
    "sfx_blocks_trim_soon": (None, []),
    # bytes in use, bytes that wait for reuse
    "sfx_blocks_count": (None, [POINTER(c_int64), POINTER(c_int64)]),
}


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # torch was built without OpenMP, or keeps it to itself: bring the system's
        for runtime in ("libgomp.so.1", "libomp.so", "libomp.dylib"):
            try:
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
                return ctypes.CDLL(str(path))
            except OSError:
                continue
        raise


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY.exists():
        reason = (
            FAILURE_NOTE.read_text().strip()
            if FAILURE_NOTE.exists()
            else "the package was installed without its build step"
        )
        return None, f"the C kernels were not built: {reason}. Reinstall surgeon-fx with gcc or clang on the path"
    try:
        lib = _open(LIBRARY)
    except OSError as error:
        return None, f"the C kernels did not load: {error}"
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib, ""


def library() -> ctypes.CDLL:
    """The loaded library. RuntimeError with the reason where there is none."""
    lib, reason = _load()
    if lib is None:
        raise RuntimeError(reason)
    return lib


def call(name: str, *arguments: object) -> int:
    """The status of a kernel that needs scratch. Without memory it runs once more after a trim, then raises."""
    function = getattr(library(), name)
    status = int(function(*arguments))
    if status < 0 and library().sfx_blocks_trim(0):
        status = int(function(*arguments))
    if status < 0:
        raise torch.OutOfMemoryError(f"not enough memory: you tried to allocate the scratch of {name}")
    return status


def unavailable_reason() -> str:
    """Why the C kernels cannot run here; empty where they can."""
    return _load()[1]


def instruction_set() -> str:
    """The instruction set in use: avx512, avx2, neon or portable."""
    return str(library().sfx_isa(-1).decode())


def instruction_sets() -> list[str]:
    """What this build and this machine can both do, best first."""
    names: list[str] = []
    while (name := library().sfx_isa(len(names))) is not None:
        names.append(name.decode())
    return [name for name in names if name]


@contextmanager
def forced_instruction_set(name: str) -> Iterator[None]:
    """For tests and measurements: run with a given instruction set."""
    before = instruction_set()
    if library().sfx_set_isa(name.encode()) != 0:
        raise ValueError(f"no {name!r} here; this machine has {', '.join(instruction_sets())}")
    try:
        yield
    finally:
        library().sfx_set_isa(before.encode())


def uses_openmp() -> bool:
    return bool(library().sfx_openmp())


def threads() -> int:
    return torch.get_num_threads()
