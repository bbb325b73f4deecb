"""Random calls of every kernel function by the hundred thousand: tests/kernels/test_fuzz.py with more cases.

    python bench/fuzz_kernels.py --cases 200000

Seven tenths go to the C kernels, in a harness that holds each result against its meaning, shared by the instruction
sets: four under address and undefined-behaviour sanitizers, two of the same while another thread writes to the input,
one under the thread sanitizer. Three tenths call the public functions from Python: right, wrong, with shared memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from common import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200_000, help="of all tests together")
    parser.add_argument("--only", default="", help="a pytest -k expression: native, wrong, ...")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/kernels/test_fuzz.py"), "-v", "-s", "--durations=0"]
    command += ["-k", arguments.only] if arguments.only else []
    begin = time.monotonic()
    environment = {**os.environ, "SURGEON_FX_FUZZ_CASES": str(arguments.cases)}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"{arguments.cases} cases in {time.monotonic() - begin:.0f} s: {'FAILED' if status else 'ok'}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
