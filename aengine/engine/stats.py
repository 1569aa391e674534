"""A snapshot of the figures of the scheduler and of all memory that it hands out, as `Stats`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from aengine.engine.loaded import Loaded
from aengine.types import Stats


def snapshot(loaded: Loaded, ended_requests: int, last_step: float | None) -> Stats:
    """last_step: monotonic time, in seconds, at which the newest step was committed."""
    scheduler = loaded.scheduler
    memory, counters = scheduler.memory, scheduler.counters
    cached = memory.tree.evictable_pages
    stats = Stats(
        running=scheduler.running,
        waiting=scheduler.waiting,
        pages_total=memory.usable_pages,
        pages_used=memory.usable_pages - memory.allocator.free - cached,
        pages_cached=cached,
        pages_free=memory.allocator.free,
        page_size=memory.page_size,
        steps=counters.steps,
        requests=ended_requests,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        cached_host_tokens=counters.cached_host_tokens,
        cached_disk_tokens=counters.cached_disk_tokens,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        last_step_age=None if last_step is None else time.monotonic() - last_step,
    )
    figures: dict[str, int] = {}
    for holding in memory.holdings:
        figures |= holding.figures()
    if loaded.adapters is not None:
        figures |= loaded.adapters.queue.figures()
    if scheduler.loading is not None:
        figures |= scheduler.loading.tiers.figures()
    return replace(stats, **figures)
