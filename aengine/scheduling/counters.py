"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    ended: int = 0  # sequences
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0  # of these, those that came out of host memory
    cached_disk_tokens: int = 0  # and of a disk
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
