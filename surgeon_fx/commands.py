"""What commands share: options that check themselves, errors of one line, and progress."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

import torch


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')} (options: {self.prog} --help)\n")


def answer(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command. Arguments that make no sense give exit code 2 and one line on standard error."""
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def leave(code: int) -> NoReturn:
    """Ends the process as it stands: the interpreter takes most of a second to take torch's modules apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def count(text: str) -> int:
    """An option that is a whole number of at least 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return found


def ratio(text: str) -> float:
    """An option that is a pruning ratio."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a ratio from 0 (keep everything) to 1 (drop everything), got {text!r}"
        )
    return found


def ratios(text: str) -> list[float]:
    return [ratio(part) for part in text.split(",")]


def shape(text: str) -> tuple[int, ...]:
    """An option that is the shape of a whole input, as 8x128."""
    try:
        found = tuple(int(part) for part in text.split("x"))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be a shape with its batch, as 8x3x224x224 or 8x128, got {text!r}")
    return found


def size(text: str) -> list[int]:
    """An option that is a height and a width, or one number for both."""
    try:
        found = [int(part) for part in text.split("x")]
    except ValueError:
        found = []
    if len(found) not in (1, 2) or min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be a size like 224 or 540x960, got {text!r}")
    return found


def devices() -> list[str]:
    """The kinds of devices that torch can use here."""
    kinds = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    return ["cpu", *(name for name, module in kinds.items() if module.is_available())]


def device(text: str) -> str:
    """An option that is a device of this machine."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a device like cpu or cuda:0, got {text!r}") from None
    present = devices()
    if found.type not in present:
        raise argparse.ArgumentTypeError(
            f"torch {torch.__version__} finds no {text} here; there is {', '.join(present)}"
        )
    if found.index is not None and found.index >= (total := _device_count(found.type)):
        raise argparse.ArgumentTypeError(f"there is no {text}: torch finds {total} of that kind, numbered from 0")
    return text


def _device_count(kind: str) -> int:
    return 1 if kind in ("cpu", "mps") else int(torch.get_device_module(kind).device_count())


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")


class Progress:
    """Steps done and time left, on one line of a terminal. Silent if quiet, or if standard error is no terminal."""

    def __init__(self, total: int, quiet: bool = False, out: TextIO | None = None) -> None:
        self.total, self.done, self.begin = total, 0, time.monotonic()
        self.out = out or sys.stderr
        self.shown = not quiet and self.out.isatty()

    def step(self, what: str) -> None:
        """Says what comes next; the step before it is done."""
        if self.shown:
            spent = time.monotonic() - self.begin
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            print(f"\r\x1b[K[{self.done + 1}/{self.total}] {what}{left}", end="", file=self.out, flush=True)
        self.done += 1

    def close(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=self.out, flush=True)
