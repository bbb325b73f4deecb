"""Without a GPU, Triton kernels run under its interpreter, which must be asked for before triton is imported."""

import os

# Some virtual machines offer AMX and trap on it, in plain torch: keep bf16 matrix products to AVX-512.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings
from model_cases import MODELS

if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    build, shape = MODELS[request.param]
    return build(), torch.randn(shape)
