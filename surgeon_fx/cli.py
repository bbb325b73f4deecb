"""The `surgeon-fx` command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

import torch
from tabulate import tabulate

import surgeon_fx
from surgeon_fx import allocator
from surgeon_fx.kernels import BACKENDS, active_backend, native, unavailable_reason


def doctor(_: argparse.Namespace) -> int:
    """Says what runs here, and why anything does not."""
    print(tabulate(_environment(), tablefmt="plain"))
    for device in _devices():
        rows = [
            [backend, "in use" if backend == active_backend(device) else "available" if not reason else "no", reason]
            for backend in BACKENDS
            if backend != "auto"
            for reason in [unavailable_reason(backend, device)]
        ]
        print(f"\nkernels on {device}")
        print(tabulate(rows, ["backend", "state", "reason"]))
    return 0


def _environment() -> list[tuple[str, str]]:
    rows = [
        ("surgeon-fx", surgeon_fx.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        *((name, _version(name)) for name in ("torchvision", "timm", "triton")),
        ("threads", str(torch.get_num_threads())),
        ("malloc", allocator.describe()),
    ]
    if native.unavailable_reason():
        return [*rows, ("C kernels", f"not in use: {native.unavailable_reason()}")]
    sets = ", ".join(native.instruction_sets())
    openmp = (
        "OpenMP, in torch's thread pool" if native.uses_openmp() else "one thread: built by a compiler without OpenMP"
    )
    return [*rows, ("C kernels", f"{native.instruction_set()} of {sets}; {openmp}")]


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    note = (
        ", interpreting (TRITON_INTERPRET=1)"
        if package == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        else ""
    )
    return metadata.version(package) + note


def _devices() -> list[str]:
    present = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    return ["cpu", *(name for name, module in present.items() if module.is_available())]


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="surgeon-fx", description="Train where memory is short.")
    parser.add_argument("--version", action="version", version=surgeon_fx.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in COMMANDS.items():
        commands.add_parser(name, help=(run.__doc__ or "").strip(), description=run.__doc__)
    parsed = parser.parse_args(arguments)
    return COMMANDS[parsed.command](parsed)


if __name__ == "__main__":
    sys.exit(main())
