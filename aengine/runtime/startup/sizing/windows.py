"""Divides memory between the pages of layers with a sliding window and those of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig

LEAST_CONTEXT = 2048  # tokens; memory is divided for contexts of at least this length, unless a knob sets it
CHUNK = 2048  # tokens of a prompt for which one step should have window pages


@dataclass(frozen=True, slots=True)
class PageGroups:
    """The sizes from which memory is divided between two groups of pages."""

    page_bytes: int  # of layers without a window; 0: there are no such layers
    window_page_bytes: int
    window: int  # tokens of the widest window
    share: float  # the least number of window pages for each page without a window
    running: int  # window pages for all sequences that can run; 0: only `share` counts
    longest: int  # pages of the longest context
    least: int  # window pages with which a single sequence can run
    ample: int  # window pages with which a single prompt is read in large chunks

    @classmethod
    def from_config(
        cls, config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, longest: int
    ) -> PageGroups | None:
        """Return the groups, or None if all layers share pages.

        They share pages if no context is longer than the windows. They also share pages if there is a host cache,
        because it copies the pages of all layers together.
        """
        windows = [window for window in model.windows if window is not None]
        if not windows or max(windows) >= longest or config.host_cache_gib:
            return None
        window, size = max(windows), config.page_size
        every, own = model.kv_shape(config.page_size, kv_dtype).split(model.sliding)
        context = min(config.window_context or max(2 * window, LEAST_CONTEXT), longest)
        least = WindowRoom.min_pages(window, size)
        if model.tower is not None and not model.tower.splittable:  # one chunk has a whole image
            least += -(-min(model.tower.rule.most_tokens, longest) // size) + 1
        chunk = -(-min(config.max_step_tokens or CHUNK, CHUNK) // size)
        share = min(1.0, window / context)
        running = 0 if config.window_context else config.max_num_seqs * WindowRoom.decode_pages(window, size)
        return cls(
            every.page_bytes, own.page_bytes, window, share, running, -(-longest // size) + 1, least, least + chunk
        )

    def divide(self, available: int, useful: int) -> tuple[int, int]:
        """Return the pages of each group that fit into `available` bytes, at most `useful` pages in each group.

        Memory goes first to one context of the longest length, then to the windows of all sequences that can run, then
        to both groups by `share`. The window group gets no more pages for running sequences than the other group has.
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

    def from_num_pages(self, num_pages: int, useful: int) -> tuple[int, int]:
        """Return the pages of each group if a knob sets `num_pages`, the pages without a window.

        If all layers have a window, the knob sets the window pages.
        """
        if not self.page_bytes:
            return useful, max(num_pages, self.least)
        return num_pages, max(int(num_pages * self.share), self.least)

    def room(self, num_pages: int) -> WindowRoom:
        return WindowRoom(self.window, num_pages)


def trial_windows(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype) -> WindowRoom | None:
    """Return a window group with only the reserved page, to which every step writes."""
    groups = PageGroups.from_config(config, model, kv_dtype, config.max_model_len or model.max_position_embeddings)
    return None if groups is None else groups.room(1)


def trial_bytes(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, num_pages: int) -> int:
    """Return the bytes of so many pages, including the group of `trial_windows`."""
    shape = model.kv_shape(config.page_size, kv_dtype)
    if trial_windows(config, model, kv_dtype) is None:
        return num_pages * shape.page_bytes
    every, own = shape.split(model.sliding)
    return num_pages * every.page_bytes + own.page_bytes
