"""What every benchmark shares: the rows of `surgeon_fx.records`, where results go, and stopwatches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from surgeon_fx.records import (
    ChildProcess,
    Environment,
    Meter,
    Row,
    RowWriter,
    Spread,
    environment,
    peak_unavailable_reason,
    read_rows,
    spread,
    status_bytes,
)

__all__ = [
    "MIB",
    "RESULTS",
    "ROOT",
    "ChildProcess",
    "Environment",
    "Meter",
    "Row",
    "RowWriter",
    "Spread",
    "Stopwatch",
    "environment",
    "others_core_seconds",
    "peak_growth",
    "peak_unavailable_reason",
    "pick_device",
    "read_rows",
    "spread",
    "status_bytes",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MIB = 1 << 20
T = TypeVar("T")


def pick_device() -> torch.device:
    for kind in ("cuda", "xpu"):
        if torch.get_device_module(kind).is_available():
            return torch.device(kind)
    return torch.device("cpu")


def others_core_seconds() -> float:
    """Core seconds that other processes have used, but for a constant; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system = stat.read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK") - time.process_time()


class Stopwatch:
    """Marks points of a device's time line. On a GPU they are events: nothing waits between two marks."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def mark(self) -> Any:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        if self._module is None:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def peak_growth(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What `work` returns, and how many bytes the peak during it lay above the level before it.

    On a CPU that is the resident memory of the process (exact to a few hundred KiB): measure in a fresh process, whose
    heap has no freed memory to hand out again.
    """
    meter = Meter(device)
    meter.forget()
    before = meter.now()
    return work(), meter.peaks(before)["peak"]
