"""Compiles every Triton kernel for GPUs that need not be here, and reads what the assembler says about registers.

    python bench/triton_targets.py                         all kernels, dtypes and targets
    python bench/triton_targets.py --targets sm_80 gfx942 --dtypes float32 --json -

Exits non-zero if a kernel does not compile. Spills are reported for NVIDIA targets, from `ptxas -v`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from tabulate import tabulate
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surgeon_fx.kernels.layout import FLOAT_BITS

compress = importlib.import_module("surgeon_fx.kernels.compress.triton")
bits = importlib.import_module("surgeon_fx.kernels.bits.triton")
sparse_grad = importlib.import_module("surgeon_fx.kernels.sparse_grad.triton")
quantize = importlib.import_module("surgeon_fx.kernels.quantize.triton")

NVIDIA = ("sm_72", "sm_75", "sm_80", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx90a", "gfx942")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_BITS if dtype is not torch.float16}  # as bfloat16
# How Triton types an integer argument: by its size, and as a constant where it is 1.
INTEGERS = ("i32", "i64", "one")
ELEMENTS = {"x", "room", "values", "out", "grad"}  # bits, as integers, but for the kernel that multiplies
FLOATS = {32: "*fp32", 16: "*bf16"}
NEVER_LARGE = re.compile(r"rows|columns|places|share|splits|(near|far|taps|stride|padding|dilation)_[dhw]")
POINTERS = {
    "state": "*i64",
    "blocks": "*i64",
    "bins": "*i64",
    "row": "*i64",
    "bitmask": "*u8",
    "bits": "*u8",
    "mask": "*u8",
    "entries": "*i32",
    "partial": "*fp32",
    "codes": "*i8",
    "scales": "",
}


@dataclass(frozen=True)
class Row:
    kernel: str
    variant: str
    dtype: str
    integers: str
    target: str
    registers: int | None
    shared_bytes: int
    spill_bytes: int | None


def kernels(width: int, any_width: bool) -> Iterator[tuple[Any, dict[str, object]]]:
    """Each kernel with its compile-time arguments; those that do not see elements only where `any_width`."""
    block = {"WIDTH": width, "SIZE": compress.BLOCK}
    yield compress.bracket_kernel, {"WIDTH": width, "SIZE": compress.SAMPLE}
    yield compress.count_kernel, block
    for level in (0, 1):
        yield compress.histogram_kernel, {**block, "LEVEL": level}
    yield compress.finish_kernel, {**block, "LEVELS": compress.levels(width)}
    yield compress.pack_kernel, block
    yield compress.expand_kernel, {"SIZE": compress.BLOCK}
    yield compress.pick_kernel, {"SIZE": compress.BLOCK}
    yield bits.pack_sign_kernel, block
    yield bits.mask_by_bits_kernel, {"SIZE": compress.BLOCK}
    if width in FLOATS:
        for transposed in (False, True):
            options = {"TRANSPOSED": transposed, "PADDED": not transposed, "CHANNELS_LAST": transposed, "WIDEN": False}
            tile = sparse_grad.tile_sizes(10**6, 10**6, width // 8, transposed)
            yield sparse_grad.product_kernel, {**options, **tile}
    blocks = {"ROWS": quantize.ROWS, "SIZE": quantize.BLOCK}
    yield quantize.quantize_kernel, {**quantize.constants(torch.float64 if width == 64 else torch.float32), **blocks}
    yield quantize.dequantize_kernel, blocks
    if any_width:
        for ties in (True, False):
            yield compress.scan_kernel, {"WITH_TIES": ties, "SIZE": compress.SCAN_BLOCK}
        yield compress.popcount_kernel, {"SIZE": compress.BLOCK // 8}
        yield sparse_grad.index_kernel, {"SIZE": compress.BLOCK // 8}
        yield bits.pack_bits_kernel, {"SIZE": compress.BLOCK}
        yield bits.unpack_bits_kernel, {"SIZE": compress.BLOCK}
        yield bits.unpack_value_kernel, {"SIZE": compress.BLOCK}


def signature(kernel: Any, width: int, constants: dict[str, object], integers: str) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if "codes" in kernel.arg_names and name in (*ELEMENTS, "scales"):  # arithmetic: floats, not their bits
            return "*fp64" if width == 64 else "*bf16" if width == 16 and name != "scales" else "*fp32"
        if name in ELEMENTS:
            return FLOATS[width] if kernel is sparse_grad.product_kernel else f"*i{width}"
        if name == "nan_key":
            return "i64" if width == 64 else "i32"
        if NEVER_LARGE.fullmatch(name):
            return "i32"
        return POINTERS.get(name, integers)

    return {name: kind(name) for name in kernel.arg_names}


def compile_kernel(kernel: Any, width: int, constants: dict[str, object], integers: str, target: str) -> Any:
    if integers == "one":
        fixed = {*ELEMENTS, *POINTERS, "nan_key", *constants}
        constants = {**constants, **{name: 1 for name in kernel.arg_names if name not in fixed}}
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target in NVIDIA else GPUTarget("hip", target, 64)
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature(kernel, width, constants, integers), constexprs=indexed)
    options = {"num_warps": compress.NUM_WARPS}
    if kernel is sparse_grad.product_kernel:
        options["num_stages"] = sparse_grad.NUM_STAGES
    return triton.compile(source, target=gpu, options=options)


def assembler_report(ptx: str) -> str:
    """What the bundled assembler says of a kernel; of the two that Triton ships, the one that reads its PTX."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for assembler in sorted(folder.glob("ptxas*")):
            command = [str(assembler), "-v", f"--gpu-name={architecture[1]}", file.name, "-o", "/dev/null"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stderr
    raise RuntimeError(f"no assembler of Triton's took the kernel: {result.stderr}")


def compile_target(target: str, dtypes: list[str], integers: str) -> list[Row]:
    rows = []
    for dtype in dtypes:
        width = 8 * DTYPES[dtype].itemsize
        for kernel, constants in kernels(width, any_width=dtype == dtypes[0]):
            compiled = compile_kernel(kernel, width, constants, integers, target)
            registers = spilled = None
            if target in NVIDIA:
                report = assembler_report(compiled.asm["ptx"])
                spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
                used = re.search(r"Used (\d+) registers", report)
                assert spills, report
                assert used, report
                registers, spilled = int(used[1]), int(spills[1]) + int(spills[2])
            variant = ", ".join(f"{k} {v}" for k, v in constants.items() if k not in ("WIDTH", "SIZE"))
            shared = compiled.metadata.shared
            rows.append(Row(kernel.__name__, variant, dtype, integers, target, registers, shared, spilled))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=[*NVIDIA, *AMD], choices=[*NVIDIA, *AMD])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--integers", nargs="+", default=INTEGERS, choices=INTEGERS)
    parser.add_argument("--json", metavar="PATH", help="JSON lines instead of a table; - for standard output")
    arguments = parser.parse_args()

    rows: list[Row] = []
    with ProcessPoolExecutor(max_workers=2) as pool:
        cases = [(target, integers) for target in arguments.targets for integers in arguments.integers]
        jobs = [pool.submit(compile_target, target, arguments.dtypes, integers) for target, integers in cases]
        for job in tqdm(jobs, unit="target"):
            rows += job.result()
    if arguments.json:
        lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        sys.stdout.write(lines) if arguments.json == "-" else Path(arguments.json).write_text(lines)
        return 0
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        spilled = f" +{row.spill_bytes} B spilled" if row.spill_bytes else ""
        cell = "ok" if row.registers is None else f"{row.registers}{spilled}"
        table.setdefault((row.kernel, row.variant, row.dtype, row.integers), {})[row.target] = cell
    headers = ["kernel", "variant", "dtype", "integers", *arguments.targets]
    print(tabulate([[*key, *(cells[t] for t in arguments.targets)] for key, cells in table.items()], headers))
    print("registers per thread; ok: compiles")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
