"""Freed is not returned: make glibc hand freed activations back to the system.

With its untouched settings glibc raises the size above which a block is mapped apart up to 32 MiB. Activations then
share one heap with whatever outlives them, the holes they leave cannot be used again, and a process that has freed most
of its memory shows no smaller. A fixed threshold makes every large block go back when it is freed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import lru_cache

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
    """Sets glibc's thresholds, once a process. Whether it did."""
    if reason := unchanged_reason():
        log.info("malloc is left as it is: %s", reason)
        return False
    libc = ctypes.CDLL(None)
    done = libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
    log.info("glibc now returns freed blocks of 1 MiB and more to the system; %s=1 keeps its own ways", KEEP_VARIABLE)
    return bool(done)
