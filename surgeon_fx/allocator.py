"""Freed is not returned: make glibc hand freed activations back to the system, at a low price.

With its untouched settings glibc raises the size above which a block is mapped apart up to 32 MiB. Activations then
share one heap with whatever outlives them, the holes they leave cannot be used again, and a process that has freed most
of its memory shows no smaller. A fixed threshold makes every large block go back when it is freed; alone, it makes a
step half as long again or more, in page faults. So freed blocks are kept for the next request of their size, as long as
that does not raise the peak, and `trim` gives them back (`kernels/native/block_cache.c`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from surgeon_fx.kernels import native

log = logging.getLogger("surgeon_fx")

THRESHOLD_BYTES = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_VARIABLE = "SURGEON_FX_KEEP_MALLOC"
USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def unchanged_reason() -> str:
    """Why malloc would be left as it is; empty where its thresholds would be set."""
    if os.environ.get(KEEP_VARIABLE):
        return f"{KEEP_VARIABLE} is set"
    if platform.libc_ver()[0] != "glibc":
        return "malloc is not glibc's"
    if preloaded := os.environ.get("LD_PRELOAD", ""):
        return f"another malloc may be preloaded: LD_PRELOAD={preloaded}"
    for name in USER_SETTINGS:
        if "malloc" in os.environ.get(name, "").lower() or (name in os.environ and name != "GLIBC_TUNABLES"):
            return f"{name} is set"
    return ""


@lru_cache(maxsize=1)
def return_freed_memory() -> bool:
    """Sets glibc's thresholds and starts to reuse freed blocks, once a process. Whether it did."""
    if reason := unchanged_reason():
        log.info("malloc is left as it is: %s", reason)
        return False
    libc = ctypes.CDLL(None)
    done = libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
    log.info(
        "glibc now returns freed blocks of 1 MiB and more to the system%s; %s=1 keeps its own ways",
        ", after reuse in torch's allocator" if _reuse() else "",
        KEEP_VARIABLE,
    )
    return bool(done)


@lru_cache(maxsize=1)
def _reuse() -> bool:
    return not native.unavailable_reason() and bool(native.library().sfx_cache_install())


def trim() -> int:
    """Gives freed blocks that wait for reuse back to the system. Returns how many bytes they had."""
    if not return_freed_memory.cache_info().currsize or not _reuse.cache_info().currsize or not _reuse():
        return 0
    return int(native.library().sfx_cache_trim())


def describe() -> str:
    """What malloc does to the saving in this process, in a sentence."""
    if return_freed_memory.cache_info().currsize and return_freed_memory():
        reuse = ", after reuse that does not raise the peak" if _reuse() else ", at the price of page faults"
        return f"glibc, set by surgeon_fx: freed blocks of 1 MiB and more leave the process{reuse}"
    if reason := unchanged_reason():
        return f"left as it is ({reason}): freed activations may stay in the process"
    return "glibc with its own settings: freed activations stay in the process until surgeon_fx.transform sets them"


@contextmanager
def forward_pass() -> Iterator[None]:
    """Around the forward of a transformed model: when it ends, or raises, freed blocks go back."""
    try:
        yield
    finally:
        trim()
