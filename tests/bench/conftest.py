"""Brings in the modules of bench/ that tests call directly.

Two of its scripts are called `kernels` and `coverage`, names that other packages look for: bench/ is on the path while
its modules are imported, and not after.
"""

import importlib
import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")

sys.path.insert(0, BENCH)
for name in ("corruptions", "memory_plan", "train_segmentation", "tta"):
    importlib.import_module(name)
sys.path.remove(BENCH)
