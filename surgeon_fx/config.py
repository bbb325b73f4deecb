"""What a user can choose about a transform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """`return_freed_memory`: on Linux, set glibc's thresholds so that freed activations leave the process."""

    return_freed_memory: bool = True
