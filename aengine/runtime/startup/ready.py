"""A runtime that is ready to run steps, and its start-up log lines."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.runtime.adapters import AdapterPlaces
from aengine.runtime.page_copies import PageCopies
from aengine.runtime.runner import Runner
from aengine.runtime.sleep import SleepableMemory
from aengine.runtime.speculation.base import NO_PROPOSER, ProposerChoice
from aengine.runtime.startup.sizing.pool import PoolSize
from aengine.runtime.weights import Weights
from aengine.step_plan import ImageCost, MixedLimit

log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model on a device, ready to run steps."""

    runner: Runner
    model: ModelConfig
    pool: PoolSize
    max_step_tokens: int
    mixed_limit: MixedLimit | None = None  # None: steps that also decode have no smaller limit
    adapters: AdapterPlaces | None = None  # None: the model has no memory for adapters
    copies: PageCopies | None = None  # None: there is no host cache
    dtypes: tuple[str, str] = ("", "")  # of the model, and of keys and values
    weights: Weights | None = None  # None: they cannot be reloaded
    memory: SleepableMemory | None = None  # None: the engine never sleeps
    speculation: ProposerChoice = NO_PROPOSER
    image_cost: ImageCost | None = None  # of the tower's work; None: the model takes no images

    def close(self) -> None:
        """Free all memory of the runtime. No launch may follow. Blocks."""
        if self.weights is not None:
            self.weights.close()
        try:
            self.runner.close()
        finally:
            if self.memory is not None:
                self.memory.close()


class StartupTimer:
    """Measures the parts of a start-up in seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._durations: list[str] = []

    def end(self, name: str) -> None:
        """End the part of this name and start the next."""
        now = time.perf_counter()
        self._durations.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join([*self._durations, f"loaded in {time.perf_counter() - self._began:.1f} s"])


def log_ready(
    decoder: Decoder,
    device: str,
    attention: str,
    config: EngineConfig,
    pool: PoolSize,
    max_step_tokens: int,
    timer: StartupTimer,
    speculation: ProposerChoice,
) -> None:
    """Log the model, its device and the sizes of its memory pools."""
    log.info(
        "%s, %.1f M parameters in %s%s, on %s; attention: %s",
        decoder.config.architecture,
        decoder.config.parameters / 1e6,
        str(decoder.dtype).removeprefix("torch."),
        " with copies of 4-bit matrices" if decoder.config.unpacked_copies and decoder.device.type == "cuda" else "",
        device,
        attention,
    )
    log.info(
        "KV pool: %d pages of %d tokens (%.0f MiB%s%s), context %d, up to %d rows, %d tokens per step; %s",
        pool.num_pages - 1,
        config.page_size,
        pool.bytes / 2**20,
        "" if decoder.config.ranks == 1 else " of each rank",
        "" if decoder.kv_dtype == decoder.dtype else f", {str(decoder.kv_dtype).removeprefix('torch.')}",
        pool.max_model_len,
        config.max_num_seqs,
        max_step_tokens,
        timer,
    )
    if pool.windows is not None:
        log.info(
            "%d layers with a window of %d tokens have %d pages of their own (%.0f MiB of the pool)",
            len(decoder.config.sliding),
            pool.windows.window,
            pool.windows.num_pages - 1,
            pool.window_bytes / 2**20,
        )
    if pool.states is not None:
        room, dtype = pool.states, str(pool.states.shape.dtype).removeprefix("torch.")
        log.info(
            "states: %d layers, %.1f MiB a row in %s (%.0f MiB), %d snapshots (%.0f MiB), every %d tokens of outputs "
            "and %d of prompts",
            room.shape.num_layers,
            room.bytes_of_row / 2**20,
            dtype,
            room.row_bytes / 2**20,
            room.snapshots.count,
            room.snapshot_bytes / 2**20,
            room.snapshots.grain,
            room.snapshots.prompt_grain,
        )
    if speculation.most_drafts:
        log.info(speculation.line)
