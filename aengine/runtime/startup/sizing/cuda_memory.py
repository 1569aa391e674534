"""Measures how much of a CUDA device's memory is left for the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aengine.cache.states import StateRoom
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.capture import Executors, capture
from aengine.runtime.startup.drafted_steps import trial_steps
from aengine.runtime.startup.image_steps import with_largest_images
from aengine.runtime.startup.sizing.windows import trial_bytes
from aengine.runtime.startup.warm_up import row_share, with_adapters

MARGIN = 256 * 2**20  # bytes; libraries allocate more memory after the trial step
MOST_CODE = 2**30  # bytes; loaded kernels and libraries take less, so more belongs to other processes
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a device in bytes."""

    total: int
    ours: int  # what this process may use
    others: int  # used by other processes and by this process's CUDA context

    @classmethod
    def measure(cls, device: torch.device, utilization: float) -> Budget:
        """Query a device. utilization: the share of its memory that this process may take."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, int(total * utilization), total - free - torch.cuda.memory_reserved(device))

    def left(self, weights: int) -> int:
        """Return the approximate bytes left for a KV pool. weights: the bytes of the weights."""
        return self.ours - self.others - weights - MARGIN


def trial_pool(config: EngineConfig, decoder: Decoder, max_step_tokens: int, most_drafts: int) -> tuple[int, int]:
    """Return the pages and the row length of an executor that can run the largest step."""
    longest = config.max_model_len or decoder.config.max_position_embeddings  # no longer than the rotary table
    length, pages_per_row = row_share(config, max_step_tokens, longest)
    return config.max_num_seqs * pages_per_row + 1, max(length, 2 + most_drafts)


def room_for_kv(
    config: EngineConfig,
    decoders: Sequence[Decoder],
    max_step_tokens: int,
    make: Callable[[int, int], Executors],
    more_graphs: int,
    states: StateRoom | None = None,
    known: Sequence[int] | None = None,
    most_drafts: int = 0,
) -> tuple[int, list[int] | None]:
    """Return the bytes for the KV pool of a rank, and the bytes that each rank needs besides (None: not measured).

    The rank with the least memory determines the pool. If `known` is None, the function runs the largest step with
    plain and with `GREEDIEST` sampling, and the step that verifies the most drafts. It captures the largest graphs, and
    measures the memory of all.

    Afterwards torch may not allocate more than the budget. Before it would, it empties its own cache.

    Args:
        make: Makes executors from a number of pages and a row length in tokens.
        more_graphs: Bytes of all graphs that are not captured here.
        states: The rows' states. `make` allocates them, and their bytes are not part of the result.
        known: The bytes that each rank needs, as an earlier start-up measured them.
        most_drafts: The most drafts of a row in a step.

    Raises: ConfigError if nothing is left.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB), None
    torch.cuda.empty_cache()  # memory that loading used
    devices = [_Measured(decoder.device, config.gpu_memory_utilization) for decoder in decoders]
    kept = 0 if states is None else states.row_bytes
    if known is not None:
        return min(device.left(needed) for device, needed in zip(devices, known, strict=True)) - kept, None
    model, kv_dtype = decoders[0].config, decoders[0].kv_dtype
    num_pages, length = trial_pool(config, decoders[0], max_step_tokens, most_drafts)
    pool = trial_bytes(config, model, kv_dtype, num_pages)
    pool += 0 if states is None else states.row_bytes
    try:
        trial = make(num_pages, length)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device.device)
        steps = with_largest_images(config, model, trial_steps(config, max_step_tokens, length, most_drafts))
        trial.warm_up(with_adapters(steps, model.lora is not None))
    except torch.OutOfMemoryError as error:
        tightest = max(devices, key=lambda device: device.weights)
        raise ConfigError(
            f"a step of {max_step_tokens} tokens and {config.max_num_seqs} rows does not fit next to the "
            f"weights ({tightest.weights / GIB:.1f} of {tightest.budget.total / GIB:.1f} GiB); lower "
            f"max_step_tokens or max_num_seqs"
        ) from error
    for device in devices:
        device.peak = torch.cuda.max_memory_allocated(device.device)
    torch.cuda.empty_cache()
    before = [device.free for device in devices]
    capture(trial)
    graphs = [free - device.free + more_graphs for free, device in zip(before, devices)]
    del trial
    torch.cuda.empty_cache()
    room = min(device.room(pool, more) for device, more in zip(devices, graphs)) - kept
    needs = [device.needs(pool, more) for device, more in zip(devices, graphs)]
    return room, needs if all(device.alone for device in devices) else None


class _Measured:
    """Measures the memory of one device while the largest step is tried."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.budget = Budget.measure(device, utilization)
        self.weights = torch.cuda.memory_allocated(device)
        self.peak = 0  # the most bytes that were allocated
        self._utilization = utilization
        self._before = self.free
        self._reserved = torch.cuda.memory_reserved(device)

    @property
    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def room(self, pool: int, graphs: int) -> int:
        """Return the bytes left for the KV pool. pool: bytes of the trial pool. Raises: ConfigError."""
        budget = self.budget
        # Memory of others, weights, loaded code, and buffers that kernels keep between steps.
        held = budget.total - self.free
        step = self.peak - pool - torch.cuda.memory_allocated(self.device)
        room = budget.ours - held - step - graphs - MARGIN - self._withheld
        if room <= 0:
            raise self._refusal(f"the largest step {step / GIB:.1f}, the graphs {graphs / GIB:.1f}")
        self._bound()
        return room

    def needs(self, pool: int, graphs: int) -> int:
        """Return the bytes needed in addition to those held at construction. Arguments as in `room`."""
        step = self.peak - pool - torch.cuda.memory_allocated(self.device)
        return self._before - self.free + step + graphs

    def left(self, needed: int) -> int:
        """Like `room`, for memory that was measured earlier. needed: as `needs` returned it. Raises: ConfigError."""
        room = self.budget.ours - (self.budget.total - self._before) - needed - MARGIN - self._withheld
        if room <= 0:
            raise self._refusal(f"all else {needed / GIB:.1f}")
        self._bound()
        return room

    @property
    def _withheld(self) -> int:
        """The bytes of the budget that torch must not use, because its share of the device cannot exceed 1.

        torch counts memory that was freed for sleep mode as its own. So `others` can be negative.
        """
        return max(0, self.budget.ours - self.budget.others - self.budget.total)

    @property
    def alone(self) -> bool:
        """Whether no other process seems to have allocated memory since construction."""
        torchs = torch.cuda.memory_reserved(self.device) - self._reserved
        return 0 <= self._before - self.free - torchs <= MOST_CODE

    def _refusal(self, rest: str) -> ConfigError:
        budget = self.budget
        return ConfigError(
            f"the model does not fit. Of {budget.ours / GIB:.1f} GiB "
            f"({self._utilization:.0%} of {self.device}) others use {budget.others / GIB:.1f}, the weights "
            f"{self.weights / GIB:.1f}, {rest}: nothing is left for the KV pool. Raise gpu_memory_utilization, lower "
            f"max_step_tokens or max_num_seqs, spread the model over more GPUs (tensor_parallel_size), or take a "
            f"smaller model"
        )

    def _bound(self) -> None:
        budget = self.budget
        share = (budget.ours - budget.others - self._withheld) / budget.total
        torch.cuda.set_per_process_memory_fraction(share, self.device)
