"""Freed is not returned: map torch's large CPU blocks apart, so that freed activations leave the process.

In malloc's heap activations share pages with whatever outlives them: the holes they leave cannot be used again, and a
process that has freed most of its memory shows no smaller. So torch's blocks of 256 KiB and more are mapped apart;
freed ones wait for the next requests if that does not raise the peak (`kernels/native/large_blocks.c`).
malloc itself, its settings and everybody else's memory are left alone.

What waits for reuse goes back to the system by itself before a fork, when memory is refused, and after a second without
large blocks that come or go, with what malloc has free. Whoever runs a model does two things besides: call
`trim_after_forward` when the outermost forward ends, also by an exception, and `trim_after_backward` with what that
forward returned.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from surgeon_fx.kernels import native

log = logging.getLogger("surgeon_fx")

KEEP_VARIABLE = "SURGEON_FX_KEEP_MALLOC"
USER_SETTINGS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
SPARED_BYTES = 8 << 20  # small networks pay for page faults more than these are worth
ALL_BYTES = 1 << 62
REFUSALS = {  # of sfx_blocks_install
    1: "it needs glibc on a 64-bit Linux",
    2: "torch has no libc10.so here",
    3: "this torch brings an allocator of its own: its libc10 does not import both posix_memalign and free",
    4: "posix_memalign and free are not the C library's: another malloc or a profiler has replaced them",
    5: "the system does not let torch's import table be changed",
}


def unchanged_reason() -> str:
    """Why torch's memory would be left to malloc; empty where large blocks would get mappings of their own."""
    if os.environ.get(KEEP_VARIABLE):
        return f"{KEEP_VARIABLE} is set"
    for name in USER_SETTINGS:
        if "malloc" in os.environ.get(name, "").lower() or (name in os.environ and name != "GLIBC_TUNABLES"):
            return f"{name} is set"
    if reason := native.unavailable_reason():
        return reason
    status = native.library().sfx_blocks_install() if _asked() else native.library().sfx_blocks_check()
    return REFUSALS.get(status, "")


@lru_cache(maxsize=1)
def return_freed_memory() -> bool:
    """From now on torch's large CPU blocks leave the process when they are freed. Whether that could be done."""
    torch.empty(1)  # both symbols are resolved by their first call
    reason = unchanged_reason()
    if not reason:
        reason = REFUSALS.get(native.library().sfx_blocks_install(), "")
    if reason:
        log.info("torch's memory is left to malloc: %s", reason)
    else:
        log.info(
            "torch's blocks of 256 KiB and more now return to the system; %s=1 leaves them to malloc", KEEP_VARIABLE
        )
    return not reason


def _asked() -> bool:
    return bool(return_freed_memory.cache_info().currsize)


def trim(spared: int = 0) -> int:
    """Gives freed blocks that wait for reuse back to the system. Returns how many bytes they had.

    `spared` bytes of them go back only once the process pauses.
    """
    return 0 if native.unavailable_reason() else int(native.library().sfx_blocks_trim(spared))


def trim_after_forward() -> None:
    """To be called when an outermost forward ends, also by an exception. Backward can use a few blocks at once."""
    trim(_spared.bytes)


class _Spared(threading.local):
    bytes = SPARED_BYTES


_spared = _Spared()


@contextmanager
def more_follows() -> Iterator[None]:
    """Forwards of this thread that end in here give nothing back: what is next, and needs more, can use the blocks."""
    before, _spared.bytes = _spared.bytes, ALL_BYTES
    try:
        yield
    finally:
        _spared.bytes = before


def trim_after_backward(outputs: Any) -> None:
    """Has freed blocks go back at the end of each backward through `outputs`, any nest of tensors.

    At once where it raises; else once the process pauses, so that the next step of a loop can use them.
    To be called with what an outermost forward returned.
    """
    if not _asked() or not return_freed_memory():
        return
    for output in tree_leaves(outputs):
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(_watch_for_the_end)


def _watch_for_the_end(_: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward())


class _EndOfBackward:
    """The autograd engine drops its callbacks when a backward ends, and calls them before if it did not raise."""

    raised = True

    def __call__(self) -> None:
        self.raised = False
        native.library().sfx_blocks_trim_soon()

    def __del__(self) -> None:
        if self.raised:
            trim()


def block_bytes() -> tuple[int, int]:
    """Bytes of torch's large blocks in use, and of those that wait for reuse; zeros where malloc has them."""
    in_use, waiting = ctypes.c_int64(), ctypes.c_int64()
    if not native.unavailable_reason():
        native.library().sfx_blocks_count(ctypes.byref(in_use), ctypes.byref(waiting))
    return in_use.value, waiting.value


def describe() -> str:
    """What happens to freed memory in this process, in a sentence."""
    if reason := unchanged_reason():
        return f"torch's memory is left to it ({reason}): freed activations may stay in the process"
    blocks = "torch's blocks of 256 KiB and more are mapped apart (posix_memalign and free of libc10)"
    if _asked():
        return f"{blocks} and leave the process when freed, after reuse that does not raise the peak"
    return f"left as it is until surgeon_fx.transform; then {blocks} and leave the process when freed"
