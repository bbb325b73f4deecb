"""What every benchmark shares: rows of one schema, where results go, and how memory and time of a process are taken.

A row is one number of one provider at one case, with its spread. Tables and plots are made from rows alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

import surgeon_fx
from surgeon_fx import allocator

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MIB = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Environment:
    """Where a row was measured."""

    python: str
    torch: str
    surgeon_fx: str
    git_sha: str
    device: str
    instruction_set: str
    threads: int
    busy_cores: float = 0.0  # taken by other processes meanwhile: OpenMP's spinning barriers do not bear company


@dataclass(frozen=True)
class Row:
    """One number. Without a `p50` it was not measured, and the note says why."""

    benchmark: str
    case: dict[str, Any]
    provider: str
    metric: str
    unit: str
    p50: float | None
    p20: float | None
    p80: float | None
    repetitions: int
    memory: str  # outputs written to: "touched" beforehand, or "fresh" from the allocator
    note: str
    environment: Environment

    @staticmethod
    def from_json(line: str) -> Row:
        fields = json.loads(line)
        return Row(**{**fields, "environment": Environment(**fields["environment"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class RowWriter:
    """Writes rows as they come, so that an interrupted run keeps what it has."""

    def __init__(self, path: Path, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._file = path.open("a" if append else "w")

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: Row) -> None:
        self.rows.append(row)
        self._file.write(row.to_json() + "\n")
        self._file.flush()


def read_rows(path: Path, benchmark: str) -> list[Row]:
    """The rows of one benchmark in a JSONL file. ValueError where there are none or they do not parse."""
    try:
        rows = [Row.from_json(line) for line in path.read_text().splitlines() if line.strip()]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not hold rows of this version's schema: {error!r}") from error
    rows = [row for row in rows if row.benchmark == benchmark]
    if not rows:
        raise ValueError(f"{path} holds no rows of the {benchmark!r} benchmark")
    return rows


def environment(device: torch.device) -> Environment:
    native = surgeon_fx.kernels.native
    name = cpu_model() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        surgeon_fx=surgeon_fx.__version__,
        git_sha=git_sha(),
        device=name,
        instruction_set="none" if native.unavailable_reason() else native.instruction_set(),
        threads=torch.get_num_threads(),
    )


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_sha() -> str:
    """The commit checked out, read from the files: git itself may not be installed."""
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        ref = head.removeprefix("ref: ")
        if (git / ref).exists():
            return (git / ref).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {ref}"))
    except (OSError, StopIteration):
        return "unknown"


def progress(quiet: bool, *iterables: Any, **options: Any) -> Any:
    """A bar on standard error, with what is done and the time left."""
    from tqdm import tqdm

    return tqdm(*iterables, file=sys.stderr, disable=quiet, **options)


class Spread(NamedTuple):
    p20: float
    p50: float
    p80: float


def spread(samples: Sequence[float]) -> Spread:
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Spread(deciles[1], deciles[4], deciles[7])


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


def status_bytes(field: str) -> int:
    """A number the kernel keeps on this process: VmRSS is resident now, VmHWM was at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} line")


def peak_unavailable_reason(device: torch.device) -> str:
    """Why peaks cannot be measured here; empty where it can."""
    if device.type == "cpu" and not Path("/proc/self/clear_refs").exists():
        return "resident memory is read from /proc, which this system does not have"
    return ""


class Meter:
    """Memory and time of this process on one device: resident memory on a CPU, the allocator's counters elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def clock(self) -> float:
        """Seconds, once the device has done what it was asked."""
        if self._module is not None:
            self._module.synchronize()
        return time.perf_counter()

    def forget(self) -> None:
        """Gives freed memory back, and lets the high-water mark start from the present level."""
        gc.collect()
        if self._module is not None:
            self._module.empty_cache()
            self._module.reset_peak_memory_stats()
            return
        allocator.trim()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's alone
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        """Bytes at present."""
        return status_bytes("VmRSS") if self._module is None else int(self._module.memory_allocated())

    def peaks(self, base: int) -> dict[str, int]:
        """The high-water mark since `forget`, above a level; on a GPU also what was reserved."""
        if self._module is None:
            return {"peak": status_bytes("VmHWM") - base}
        peak = int(self._module.max_memory_allocated()) - base
        return {"peak": peak, "reserved": int(self._module.max_memory_reserved())}


def peak_growth(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What `work` returns, and how many bytes the peak during it lay above the level before it.

    On a CPU that is the resident memory of the process (exact to a few hundred KiB): measure in a fresh process, whose
    heap has no freed memory to hand out again.
    """
    meter = Meter(device)
    meter.forget()
    before = meter.now()
    return work(), meter.peaks(before)["peak"]


class ChildProcess:
    """A process that runs only while it is asked: one line in, one line of JSON out."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, limit: float | None = None) -> dict[str, Any]:
        """The answer to a line. A process that takes longer than `limit` seconds is ended."""
        assert self.process.stdout is not None
        late = threading.Timer(limit or 0, self.process.kill)
        if limit is not None:
            late.start()
        try:
            self.send(what)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            raise ValueError(f"{self.name}: the process that measures it ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and what it was asked last is still in the buffer
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
