"""Freed memory leaves the process, blocks are reused without a higher peak, and nobody else is touched."""

import os
import subprocess
import sys

import pytest

from surgeon_fx import allocator
from surgeon_fx.kernels import native

pytestmark = pytest.mark.skipif(bool(allocator.unchanged_reason()), reason="malloc would be left as it is here")
reuse = pytest.mark.skipif(bool(native.unavailable_reason()), reason="no C kernels here")

HEADER = """
import threading, torch, surgeon_fx
from surgeon_fx import allocator
MIB = 1 << 20
def resident(field="VmRSS"):
    return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) // 1024
"""


def run(code, **environment):
    """In a fresh process, because the setting is one of the process."""
    clean = {k: v for k, v in os.environ.items() if k not in (*allocator.USER_SETTINGS, allocator.KEEP_VARIABLE)}
    command = [sys.executable, "-c", HEADER + code]
    environment = {**clean, **environment, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@reuse
def test_freed_activations_leave_the_process():
    used, before, after = run(
        """
surgeon_fx.transform(torch.nn.Linear(2, 2))
torch.ones(2 * MIB); allocator.trim()
base = resident()
blocks = [torch.ones(2 * MIB) for _ in range(30)]
print(resident() - base)
survivors = [torch.ones(4096) for _ in range(100)]
del blocks
print(resident() - base); allocator.trim(); print(resident() - base)
"""
    )
    assert int(used) >= 240
    assert int(before) >= 200  # for the next request
    assert int(after) <= 8


@reuse
def test_a_freed_block_serves_the_next_request_of_its_size_and_no_other():
    assert run(
        """
allocator.return_freed_memory()
x = torch.empty(2 * MIB); at = x.data_ptr(); del x
small = torch.empty(MIB)
same = torch.empty(2 * MIB)
print(small.data_ptr() != at, same.data_ptr() == at)
""",
    ) == ["True", "True"]


@reuse
def test_reuse_does_not_raise_the_peak():
    (peak,) = run(
        """
allocator.return_freed_memory()
torch.ones(2); base = resident()
open("/proc/self/clear_refs", "w").write("5")
for size in range(8, 40):  # sizes that never match: every freed block is in the way of the next
    x = torch.ones(size * MIB // 4)
    y = torch.ones(size * MIB // 4)
    del x, y
print(resident("VmHWM") - base)
"""
    )
    assert int(peak) <= 2 * 39 + 24


@reuse
def test_threads_and_forks():
    assert run(
        """
import os
allocator.return_freed_memory()
def work():
    for i in range(300):
        x = torch.full((MIB // 2 + 4096 * (i % 7),), float(i)); assert x[-1] == i
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
kept = torch.empty(MIB)
for _ in range(5):
    child = os.fork()
    if child == 0:
        work(); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
surgeon_fx.kernels.native.library().sfx_cache_remove()
work()
print("done")
"""
    ) == ["done"]


def test_nothing_happens_without_a_transform():
    assert "its own settings" in " ".join(run("torch.ones(MIB); print(allocator.describe(), allocator.trim())"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [(allocator.KEEP_VARIABLE, "1"), ("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.check=1")],
)
def test_left_alone_where_the_user_said_so(variable, value):
    words = run("print(allocator.return_freed_memory(), allocator.describe())", **{variable: value})
    assert words[0] == "False"
    assert variable in " ".join(words)


def test_config_switches_it_off():
    code = """
surgeon_fx.transform(torch.nn.Linear(2, 2), surgeon_fx.Config(return_freed_memory=False))
print(allocator.describe())
"""
    assert "its own settings" in " ".join(run(code))
