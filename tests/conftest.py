"""Without a GPU, Triton kernels run under its interpreter, which must be asked for before triton is imported."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

# Some virtual machines offer AMX and trap on it, in plain torch: keep bf16 matrix products to AVX-512.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Threads that wait do not spin: tests that run several would take the cores from the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from model_cases import MODELS
from native_harness import BUILDS

if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `pytest -m fast`: what a change to operations, passes or kernels is checked with first, in three minutes.
FAST = (
    *("ops/", "passes/", "test_transform.py", "test_ratio_table.py", "test_modules.py"),
    *(f"kernels/test_{name}.py" for name in ("backends", "bits", "compress", "layout")),
)


def pytest_configure(config):
    if BUILDS not in os.environ:  # one folder for all processes of a run
        folder = TemporaryDirectory(prefix="surgeon_fx_builds_")
        os.environ[BUILDS] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(FAST):
            item.add_marker(pytest.mark.fast)


settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    build, shape = MODELS[request.param]
    return build(), torch.randn(shape)
