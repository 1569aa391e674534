"""Whether layers with a sliding window keep pages of their own, and how a memory is divided between both groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aengine.cache.kv import SlidingLayers
from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig

LEAST_CONTEXT = 2048  # tokens of a sequence that memory is divided for, unless a knob says how many
CHUNK = 2048  # tokens of a prompt that there should be pages for in one step


@dataclass(frozen=True, slots=True)
class PageGroups:
    """What a page of each group takes, and how many tokens of a context each is meant to hold."""

    page_bytes: int  # of layers that see everything; 0: there are none
    window_page_bytes: int
    window: int  # tokens, the widest
    share: float  # pages of windows for each of the others, at least
    running: int  # pages of windows of as many sequences as can run; 0: the share alone counts
    longest: int  # pages of a context
    least: int  # pages of windows: a sequence alone goes on with so many
    ample: int  # and is read in large pieces with so many

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, longest: int) -> PageGroups | None:
        """None: all layers keep pages together. That is so where no context outgrows the windows, and where pages go to
        host memory, which takes and gives those of all layers at once.
        """
        windows = [window for window in model.windows if window is not None]
        if not windows or max(windows) >= longest or config.host_cache_gib:
            return None
        window, size = max(windows), config.page_size
        every, own = model.kv_shape(config.page_size, kv_dtype).split(model.sliding)
        context = min(config.window_context or max(2 * window, LEAST_CONTEXT), longest)
        least = WindowRoom.least(window, size)
        chunk = -(-min(config.max_step_tokens or CHUNK, CHUNK) // size)
        share = min(1.0, window / context)
        running = 0 if config.window_context else config.max_num_seqs * WindowRoom.held(window, size)
        return cls(
            every.page_bytes, own.page_bytes, window, share, running, -(-longest // size) + 1, least, least + chunk
        )

    def divide(self, available: int, useful: int) -> tuple[int, int]:
        """How many pages of each group `available` bytes hold; of neither more than `useful` ones.

        By their shares; windows of all sequences that can run come first, but for as many tokens as others have, and
        before both the longest context.
        """
        most = max(useful, self.least)
        if not self.page_bytes:
            return useful, min(available // self.window_page_bytes, most)
        each = self.page_bytes + self.share * self.window_page_bytes
        equal = available // (self.page_bytes + self.window_page_bytes)
        shared = max(int(available / each * self.share), min(self.running, equal))
        windows = min(max(shared, self.least), most)
        pages = (available - windows * self.window_page_bytes) // self.page_bytes
        for fewer in (self.ample, self.least):
            if pages < self.longest and fewer < windows:
                pages = min((available - fewer * self.window_page_bytes) // self.page_bytes, self.longest)
        pages = min(pages, useful)
        return pages, min((available - pages * self.page_bytes) // self.window_page_bytes, most)

    def beside(self, num_pages: int, useful: int) -> tuple[int, int]:
        """Where a knob says how many pages there are: of the group that holds the most of a context."""
        if not self.page_bytes:
            return useful, max(num_pages, self.least)
        return num_pages, max(int(num_pages * self.share), self.least)

    def room(self, num_pages: int) -> WindowRoom:
        return WindowRoom(self.window, num_pages)


def sliding_layers(model: ModelConfig, windows: WindowRoom | None) -> SlidingLayers | None:
    """Which layers of the model keep theirs in that room."""
    return None if windows is None else SlidingLayers(model.sliding, windows.num_pages)


def trial_windows(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype) -> WindowRoom | None:
    """A window group in which every step writes to the reserved page alone."""
    groups = PageGroups.of(config, model, kv_dtype, config.max_model_len or model.max_position_embeddings)
    return None if groups is None else groups.room(1)


def trial_bytes(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, num_pages: int) -> int:
    """What so many pages take, with that group beside them."""
    shape = model.kv_shape(config.page_size, kv_dtype)
    if trial_windows(config, model, kv_dtype) is None:
        return num_pages * shape.page_bytes
    every, own = shape.split(model.sliding)
    return num_pages * every.page_bytes + own.page_bytes
