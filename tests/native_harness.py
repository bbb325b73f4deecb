"""Builds tests/kernels/native_fuzz.c, plain or under sanitizers, and runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from zlib import crc32

import pytest

SOURCES = Path(__file__).parents[1] / "kernels" / "native"
HARNESS = Path(__file__).parent / "kernels" / "native_fuzz.c"
BUILDS = "SURGEON_FX_TEST_BUILDS"


@cache
def build(*flags: str, compiler: str = "gcc", source: Path = HARNESS, alone: bool = False) -> Path:
    """The compiled harness, with the kernels unless it is `alone`.

    Skips the test where the compiler or the sanitizer is missing.
    """
    if not shutil.which(compiler):
        pytest.skip(f"needs {compiler}")
    program = Path(mkdtemp(dir=builds())) / source.stem
    kernels = [path for path in sorted(SOURCES.glob("*.c")) if not alone]
    objects = [compiled(path, compiler, flags) for path in (source, *kernels)]
    link_command = [compiler, *flags, *map(str, objects), "-o", str(program), "-lm", "-lpthread"]
    link = subprocess.run(link_command, capture_output=True)
    if link.returncode:
        pytest.skip(f"{compiler} cannot link {' '.join(flags)} here")
    return program


@cache
def builds() -> Path:
    """Where the processes of one run of the tests keep what they have compiled; tests/conftest.py takes it away."""
    return Path(os.environ[BUILDS])


def compiled(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The object file, made by whichever process needs it first."""
    import fcntl  # not on Windows

    name = f"{source.stem}-{crc32(repr((compiler, flags)).encode())}"
    output = builds() / f"{name}.o"
    with (builds() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            # Compiled for OpenMP and linked without it: the harness brings a runtime of its own.
            command = [compiler, "-O1", "-g", "-std=gnu11", "-fopenmp", *flags, f"-I{SOURCES}", "-c"]
            half = output.with_suffix(".half")
            subprocess.run([*command, str(source), "-o", str(half)], check=True)
            half.rename(output)
    return output


def sanitized(sanitizers: str, source: Path = HARNESS, alone: bool = False) -> Path:
    return build(
        f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-sanitize=alignment", source=source, alone=alone
    )


def run(*command: object) -> str:
    """What a harness printed; the test fails with it where it found anything."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
