"""The `surgeon-fx` command."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

import torch
from torch import nn

import surgeon_fx
from surgeon_fx import allocator, commands, zoo
from surgeon_fx.kernels import BACKENDS, active_backend, native, unavailable_reason
from surgeon_fx.tables import table
from surgeon_fx.zoo.external import require

COLUMNS = ("backend", "state", "reason")


def doctor(arguments: argparse.Namespace) -> int:
    """Says what runs here, and why anything does not."""
    environment, backends = _environment(), {device: _backends(device) for device in commands.devices()}
    if arguments.json:
        found = {device: [dict(zip(COLUMNS, row, strict=True)) for row in rows] for device, rows in backends.items()}
        print(json.dumps({"environment": dict(environment), "kernels": found}))
        return 0
    print(table(environment, plain=True))
    for device, rows in backends.items():
        print(f"\nkernels on {device}")
        print(table(rows, COLUMNS))
    return 0


def _backends(device: str) -> list[list[str]]:
    """Each backend of the kernels, its state on a device, and the reason."""
    return [
        [backend, "in use" if backend == active_backend(device) else "available" if not reason else "no", reason]
        for backend in BACKENDS
        if backend != "auto"
        for reason in [unavailable_reason(backend, device)]
    ]


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


def plan(arguments: argparse.Namespace) -> int:
    """Predicts the memory of every way to adapt a model, before anything runs."""
    from surgeon_fx.planner import methods, serve

    if arguments.serve is not None:
        return commands.answer(serve.run, arguments)
    return methods.run(arguments)


def models(arguments: argparse.Namespace) -> int:
    """Lists the models that have a name, or searches them: the zoo's own, timm's and torchvision's."""
    text = arguments.text.lower()
    entries = [zoo.entry(name) for name in zoo.names()]
    entries = [entry for entry in entries if text in f"{entry.name} {entry.summary}".lower()]
    if arguments.json:
        names = [f"{name}" for _, some in _external_names() for name in some if text in name.lower()]
        own = [
            {"name": entry.name, "input": entry.input_shape, "parameters": _parameters(entry.build)}
            for entry in entries
        ]
        print(json.dumps({"zoo": own, "others": names}))
        return 0 if own or names else 1
    rows = [
        [entry.name, "x".join(map(str, entry.input_shape)), f"{_parameters(entry.build):,}", entry.summary]
        for entry in entries
    ]
    if rows:
        print(table(rows, ["model", "input", "parameters", ""], colalign=("left", "left", "right", "left")))
    if not text:
        print("\nand every name of timm, tv: and hf: names; surgeon-fx models TEXT searches those of timm and tv:")
        return 0
    found = [(title, [name for name in names if text in name.lower()]) for title, names in _external_names()]
    for title, names in found:
        if names:
            print(f"\n{title}")
            print("\n".join(names))
    if rows or any(names for _, names in found):
        return 0
    everyone = [*zoo.names(), *(name for _, names in _external_names() for name in names)]
    near = difflib.get_close_matches(text, everyone, n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    print(f"no model has {text!r} in its name{hint}", file=sys.stderr)
    return 1


def _parameters(build: Callable[..., nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def _external_names() -> list[tuple[str, list[str]]]:
    """Names of the packages that are installed."""
    found = []
    if importlib.util.find_spec("timm") is not None:
        found.append(("timm", list(require("timm").list_models())))
    if importlib.util.find_spec("torchvision") is not None:
        names = require("torchvision").models.list_models()
        found.append(("torchvision", [f"tv:{name}" for name in names]))
    return found


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from surgeon_fx.planner import methods, serve

    methods.add_arguments(parser)
    serve.add_arguments(parser)


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", default="", help="part of a name")
    _json_argument(parser)


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": doctor,
    "plan": plan,
    "models": models,
}
ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "doctor": _json_argument,
    "plan": _plan_arguments,
    "models": _models_arguments,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.Parser(prog="surgeon-fx", description="Train where memory is short.")
    parser.add_argument("--version", action="version", version=surgeon_fx.__version__)
    names = parser.add_subparsers(dest="command", required=True)
    for name, run in COMMANDS.items():
        command = names.add_parser(name, help=(run.__doc__ or "").strip(), description=run.__doc__)
        ARGUMENTS[name](command)
    parsed = parser.parse_args(arguments)
    return COMMANDS[parsed.command](parsed)


if __name__ == "__main__":
    sys.exit(main())
