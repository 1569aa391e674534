"""A snapshot of the scheduler's and the pool's figures as `Stats`."""

from __future__ import annotations

import time

from aengine.cache.tiers.tiers import TierCounters
from aengine.scheduling.scheduler import Scheduler
from aengine.types import Stats


def snapshot(scheduler: Scheduler, ended_requests: int, last_step: float | None) -> Stats:
    """`last_step` is the monotonic time, in seconds, at which the newest step was committed."""
    memory, counters, adapters = scheduler.memory, scheduler.counters, scheduler.adapters
    snapshots = None if memory.snapshots is None else memory.snapshots.slots
    cached = memory.tree.evictable_pages
    windows = None if memory.windows is None else memory.windows.pages
    tiers = None if scheduler.loading is None else scheduler.loading.tiers
    below = TierCounters() if tiers is None else tiers.counters
    return Stats(
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
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        adapter_places=0 if adapters is None else adapters.places,
        adapter_loads=0 if adapters is None else adapters.loads,
        adapter_evictions=0 if adapters is None else adapters.evictions,
        cached_host_tokens=counters.cached_host_tokens,
        cached_disk_tokens=counters.cached_disk_tokens,
        host_pages_total=0 if tiers is None else tiers.host.slots,
        host_pages=0 if tiers is None else len(tiers.host),
        host_page_bytes=0 if tiers is None else tiers.page_bytes,
        host_stores=below.stored_pages,
        host_loads=below.loaded_pages,
        host_misses=below.lost_pages,
        disk_bytes=0 if tiers is None or tiers.disk is None else tiers.disk.bytes,
        disk_stores=below.written_pages,
        disk_loads=below.read_pages,
        state_snapshots=0 if snapshots is None else snapshots.room.count,
        state_snapshots_used=0 if snapshots is None else snapshots.room.count - snapshots.free,
        state_snapshot_evictions=0 if snapshots is None else snapshots.evictions,
        window_pages=0 if windows is None else windows.usable,
        window_pages_used=0 if windows is None else windows.usable - windows.available,
        window_pages_cached=0 if windows is None else windows.idle,
        last_step_age=None if last_step is None else time.monotonic() - last_step,
    )
