"""Chooses the size of the KV pool and the longest context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from aengine.cache.states import StateRoom
from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.config.speculation import read_speculation
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.spec.attention import AttentionSpec
from aengine.runtime.device import host_memory
from aengine.runtime.startup.sizing.states import room_for_states
from aengine.runtime.startup.sizing.windows import PageGroups

CPU_KV_GIB = 1.0


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of the KV pool, and of the pools of states and window pages."""

    num_pages: int  # including the reserved page 0
    page_bytes: int
    max_model_len: int
    states: StateRoom | None = None  # None: no layer has a recurrent state
    windows: WindowRoom | None = None  # None: layers with a window share the pages of all layers
    window_page_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pages of all layers."""
        return self.num_pages * self.page_bytes + self.window_bytes

    @property
    def window_bytes(self) -> int:
        return 0 if self.windows is None else self.windows.num_pages * self.window_page_bytes


def check_length(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest context in tokens.

    Raises: ConfigError if the model has fewer positions than configured, or for settings that layers with chunks do not
        take.
    """
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {longest} is beyond the model's {model.max_position_embeddings} positions; lower it"
        )
    _check_chunks(config, model, longest)
    return longest


def _check_chunks(config: EngineConfig, model: ModelConfig, longest: int) -> None:
    sizes = {one.chunk_within(longest) for one in model.attending if isinstance(one, AttentionSpec)}
    for size in filter(None, sizes):
        if size % config.page_size:
            raise ConfigError(
                f"page_size: {config.page_size} does not divide the chunks of {size} tokens in which layers attend; "
                f"write a divisor, or a max_model_len of at most {size}"
            )
        if read_speculation(config.speculation).kind not in ("auto", "off"):
            raise ConfigError(
                f"speculation: layers that attend within chunks of {size} tokens take no drafts; write off, or a "
                f"max_model_len of at most {size}"
            )


def size_pool(
    config: EngineConfig,
    model: ModelConfig,
    kv_dtype: torch.dtype,
    available: int,
    memory: int | None = None,
    dtype: torch.dtype = torch.float32,
    most_drafts: int = 0,
) -> PoolSize:
    """Return the pool that fits into `available` bytes, and the longest context that fits into the pool.

    Snapshots of recurrent states share these bytes. The states of running rows do not.

    Args:
        kv_dtype: The dtype of keys and values.
        memory: All bytes of the device. None: not known.
        dtype: The model's dtype.
        most_drafts: The most drafts of a row in a step.

    Raises: ConfigError if no sequence of the configured length fits, or if the configured pages do not fit into the
        memory. The error shows the calculation.
    """
    page_bytes = model.kv_shape(config.page_size, kv_dtype).page_bytes
    longest = check_length(config, model)
    states = room_for_states(config, model, dtype, page_bytes, available, most_drafts)
    if states is not None and config.num_pages is None:
        available -= states.snapshot_bytes
    # All rows at full length use this many pages. More would never be used.
    useful = config.max_num_seqs * -(-longest // config.page_size) + 1
    groups, window_pages = PageGroups.from_config(config, model, kv_dtype, longest), 0
    if config.num_pages is not None:
        num_pages = config.num_pages
        if groups is not None:
            num_pages, window_pages = groups.from_num_pages(num_pages, useful)
    else:
        # The rows' page tables, an int32 for each page, must not outgrow the pool.
        useful = min(useful, available // (4 * (config.max_num_seqs + 1)) + 1)
        num_pages = min(available // page_bytes, useful)
        if groups is not None:
            num_pages, window_pages = groups.divide(available, useful)
    if groups is not None:
        page_bytes = groups.page_bytes
    fits = (num_pages - 1) * config.page_size
    if fits < config.page_size or (config.max_model_len is not None and fits < longest):
        raise ConfigError(
            f"the KV pool of {max(num_pages, 0)} pages ({num_pages * page_bytes / 2**20:.1f} MiB, "
            f"{page_bytes / 1024:.1f} KiB per page of {config.page_size} tokens, page 0 reserved) holds {max(fits, 0)} "
            f"tokens, max_model_len asks for {longest}: raise kv_cache_gib or num_pages, or lower max_model_len"
        )
    pool = PoolSize(num_pages, page_bytes, min(longest, fits), states)
    if groups is not None:
        pool = replace(pool, windows=groups.room(window_pages), window_page_bytes=groups.window_page_bytes)
        if config.num_pages is None and pool.bytes > available:
            raise ConfigError(
                f"the KV pool has {available / 2**20:.1f} MiB; a window of {groups.window} tokens takes "
                f"{groups.least * groups.window_page_bytes / 2**20:.1f} of them in each sequence: raise kv_cache_gib"
            )
    if memory is not None and pool.bytes > memory:
        knob = "kv_cache_gib" if config.num_pages is None else "num_pages"
        blamed = f"{knob}: " if config.num_pages is not None or config.kv_cache_gib is not None else ""
        raise ConfigError(
            f"{blamed}a KV pool of {num_pages} pages takes {pool.bytes / 2**30:.1f} GiB, and there are "
            f"{memory / 2**30:.1f} GiB of memory: at most {memory * num_pages // pool.bytes} pages; lower {knob}"
        )
    if memory is not None and states is not None and pool.bytes + states.row_bytes + states.snapshot_bytes > memory:
        raise ConfigError(
            f"the states of {states.rows} rows take {states.row_bytes / 2**30:.1f} GiB, "
            f"{states.snapshots.count} snapshots {states.snapshot_bytes / 2**30:.1f}, and pages "
            f"{pool.bytes / 2**30:.1f}, of {memory / 2**30:.1f} GiB of memory; lower max_num_seqs or state_snapshots"
        )
    return pool


def host_slots(config: EngineConfig, model: ModelConfig, page_bytes: int) -> int:
    """Return the number of pages in the host cache. 0: there is no host cache.

    page_bytes: the bytes of one page on each rank.

    Raises: ConfigError if the cache is too small or larger than nine tenths of the machine's memory. Also if the model
        has recurrent layers, because the host cache does not hold their states.
    """
    if not config.host_cache_gib:
        return 0
    if model.recurrent:
        raise ConfigError("host_cache_gib: the states of linear attention stay on the device; leave it out (0)")
    nbytes = int(config.host_cache_gib * 2**30)
    memory = host_memory()
    if memory is not None and nbytes > memory * 9 // 10:
        raise ConfigError(
            f"host_cache_gib: {config.host_cache_gib} GiB of {memory / 2**30:.1f} GiB of memory leave too little for "
            f"everything else; at most {memory * 9 // 10 / 2**30:.1f} are allowed"
        )
    slots = nbytes // (page_bytes * model.ranks)
    if slots < 4:
        raise ConfigError(
            f"host_cache_gib: {config.host_cache_gib} GiB hold {slots} pages of "
            f"{page_bytes * model.ranks / 2**20:.1f} MiB; raise it, or lower page_size"
        )
    return slots
