"""How a command ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable


def answer(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command; 2 and one line on standard error where its arguments make no sense."""
    try:
        return command(arguments)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
