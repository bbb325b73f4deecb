"""Which implementation serves a call: by device, or by name; and the `torch.library` ops that ask.

An op is defined once. Under "auto" the dispatcher picks by device, and each device has its preferences in order; a name
forces one implementation, or raises with the reason why it cannot run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from surgeon_fx.kernels import native

BACKENDS = ("auto", "reference", "torch", "cpu", "triton")
PREFERENCES = {  # by dispatch key; any other device has the pure-torch path
    "CPU": ("cpu", "torch"),
    "CUDA": ("triton", "torch"),  # ROCm's too
    "XPU": ("triton", "torch"),
    "CompositeExplicitAutograd": ("torch",),
}
MODULES = {"reference": "reference", "torch": "pure_torch", "cpu": "cpu", "triton": "triton"}

LIBRARY = torch.library.Library("surgeon_fx", "DEF")
# Outputs follow the memory order of the input: a compiler must not change its strides.
STRIDES_MATTER = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run here."""


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


@cache
def unavailable_reason(backend: str, device: str) -> str:
    """Why a backend cannot serve tensors of a device type; empty where it can."""
    if backend == "cpu":
        return f"it works on CPU tensors, not {device}" if device != "cpu" else native.unavailable_reason()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
            return f"Triton has no {device} target; set TRITON_INTERPRET=1 before import to run its interpreter"
    return ""


@cache
def active_backend(device: str = "cpu") -> str:
    """What "auto" means for a device type."""
    for backend in PREFERENCES.get(device.upper(), PREFERENCES["CompositeExplicitAutograd"]):
        if not unavailable_reason(backend, device):
            return backend
    raise AssertionError("the pure-torch path runs anywhere")


@cache
def implementation(family: str, backend: str, device: str) -> ModuleType:
    """The module that implements a family of kernels ("compress" or "bits") for a call."""
    if check_backend(backend) == "auto":
        backend = active_backend(device)
    elif reason := unavailable_reason(backend, device):
        raise BackendUnavailable(f"backend {backend!r} is not available: {reason}")
    return importlib.import_module(f"surgeon_fx.kernels.{family}.{MODULES[backend]}")


FAKES: dict[Any, Callable[..., Any]] = {}  # of each op: what it makes, as shapes


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Defines `surgeon_fx::<schema>`; `run` picks its implementation by the device it was dispatched for.

    Returns what calls it. Where nobody could tell the difference, that is `run` itself: the way through the dispatcher
    and back takes as long as a kernel on a small tensor.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES_MATTER))
    for key in PREFERENCES:
        LIBRARY.impl(name, run, key)
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # not differentiable, said once for every backend
    torch.library.register_fake(f"surgeon_fx::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.surgeon_fx, name).default
    FAKES[op] = fake

    def call(x: Tensor, *arguments: Any) -> Any:
        return (run if is_plain(x) else op)(x, *arguments)

    return call


def is_plain(x: Tensor) -> bool:
    """A CPU tensor that is just that, with no compiler, mode or function transform looking on."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not torch.compiler.is_dynamo_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch.jit.is_tracing()
        and not x.is_neg()
    )
