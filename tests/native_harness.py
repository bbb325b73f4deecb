"""Builds tests/kernels/native_fuzz.c, plain or under sanitizers, and runs it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCES = Path(__file__).parents[1] / "kernels" / "native"
HARNESS = Path(__file__).parent / "kernels" / "native_fuzz.c"


@cache
def build(*flags: str, compiler: str = "gcc", source: Path = HARNESS, alone: bool = False) -> Path:
    """The compiled harness, with the kernels unless it is `alone`.

    Skips the test where the compiler or the sanitizer is missing.
    """
    if not shutil.which(compiler):
        pytest.skip(f"needs {compiler}")
    program = Path(mkdtemp(prefix="surgeon_fx_fuzz_")) / source.stem
    # Compiled for OpenMP and linked without it: the harness brings a runtime of its own.
    compile_command = [compiler, "-O1", "-g", "-std=gnu11", "-fopenmp", *flags, f"-I{SOURCES}", "-c"]
    kernels = [path for path in sorted(SOURCES.glob("*.c")) if not alone and path.name != "large_blocks.c"]
    objects = [program.with_name(f"{path.stem}.o") for path in (source, *kernels)]
    for path, output in zip((source, *kernels), objects, strict=True):
        subprocess.run([*compile_command, str(path), "-o", str(output)], check=True)
    link_command = [compiler, *flags, *map(str, objects), "-o", str(program), "-lm", "-lpthread"]
    link = subprocess.run(link_command, capture_output=True)
    if link.returncode:
        pytest.skip(f"{compiler} cannot link {' '.join(flags)} here")
    return program


def sanitized(sanitizers: str, source: Path = HARNESS, alone: bool = False) -> Path:
    return build(
        f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-sanitize=alignment", source=source, alone=alone
    )


def run(*command: object) -> str:
    """What a harness printed; the test fails with it where it found anything."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
