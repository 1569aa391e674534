"""How much of a CUDA device's memory the KV pool may have: what is left once everything else has had its most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aengine.cache.states import StateRoom
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.capture import Executors, capture
from aengine.runtime.startup.warm_up import largest_steps, row_share, with_adapters
from aengine.runtime.startup.window_sizing import trial_bytes

MARGIN = 256 * 2**20  # what libraries allocate on first use, beyond what a trial step shows
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a device: all of them, how many this process may take, how many others have taken."""

    total: int
    ours: int
    others: int  # other processes, and this one's CUDA context

    @classmethod
    def of(cls, device: torch.device, utilization: float) -> Budget:
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, int(total * utilization), total - free - torch.cuda.memory_reserved(device))

    def left(self, weights: int) -> int:
        """Roughly what a KV pool can have beside so many bytes of weights."""
        return self.ours - self.others - weights - MARGIN


def trial_pool(config: EngineConfig, decoder: Decoder, max_step_tokens: int) -> tuple[int, int]:
    """Pages, and the length of each row, of an executor that can run the largest step."""
    longest = config.max_model_len or decoder.config.max_position_embeddings  # no longer than the rotary table
    length, pages_per_row = row_share(config, max_step_tokens, longest)
    return config.max_num_seqs * pages_per_row + 1, length


def room_for_kv(
    config: EngineConfig,
    decoders: Sequence[Decoder],
    max_step_tokens: int,
    make: Callable[[int, int], Executors],
    more_graphs: int,
    states: StateRoom | None = None,
) -> int:
    """Bytes for the KV pool of each rank, which the tightest one has. Raises `ConfigError` where nothing is left.

    Runs the largest step, once with the plainest and once with the greediest sampling, and captures the largest graphs,
    over `make(num_pages, max_model_len)`, and looks at what that took. more_graphs: bytes of those not captured here;
    states: of the rows, which `make` makes and which are no part of the room.
    From then on the process may not allocate more than its budget: torch empties its own cache before it would.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    model, kv_dtype = decoders[0].config, decoders[0].kv_dtype
    num_pages, length = trial_pool(config, decoders[0], max_step_tokens)
    pool = trial_bytes(config, model, kv_dtype, num_pages)
    pool += 0 if states is None else states.row_bytes
    devices = [_Measured(decoder.device, config.gpu_memory_utilization) for decoder in decoders]
    try:
        trial = make(num_pages, length)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device.device)
        trial.warm_up(with_adapters(largest_steps(config, max_step_tokens, length), model.lora is not None))
    except torch.OutOfMemoryError as error:
        tightest = max(devices, key=lambda device: device.weights)
        raise ConfigError(
            f"max_step_tokens: a step of {max_step_tokens} tokens and {config.max_num_seqs} rows does not fit beside "
            f"the weights ({tightest.weights / GIB:.1f} of {tightest.budget.total / GIB:.1f} GiB); lower "
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
    kept = 0 if states is None else states.row_bytes
    return min(device.room(pool, more) for device, more in zip(devices, graphs)) - kept


class _Measured:
    """The memory of one device while the largest step is tried."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.budget = Budget.of(device, utilization)
        self.weights = torch.cuda.memory_allocated(device)
        self.peak = 0  # bytes that were allocated at most
        self._utilization = utilization

    @property
    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def room(self, pool: int, graphs: int) -> int:
        """What is left for the KV pool; pool: bytes of the one that was tried. Raises `ConfigError`."""
        budget = self.budget
        # By others, by weights, by code that is loaded now and by what kernels keep between steps: keys out of pages.
        held = budget.total - self.free
        step = self.peak - pool - torch.cuda.memory_allocated(self.device)
        room = budget.ours - held - step - graphs - MARGIN
        if room <= 0:
            raise ConfigError(
                f"gpu_memory_utilization: the model does not fit. Of {budget.ours / GIB:.1f} GiB "
                f"({self._utilization:.0%} of {self.device}) others use {budget.others / GIB:.1f}, the weights "
                f"{self.weights / GIB:.1f}, the largest step {step / GIB:.1f}, the graphs {graphs / GIB:.1f}: nothing "
                f"is left for the KV pool. Raise it, lower max_step_tokens or max_num_seqs, spread the model over more "
                f"GPUs (tensor_parallel_size), or take a smaller model"
            )
        torch.cuda.set_per_process_memory_fraction((budget.ours - budget.others) / budget.total, self.device)
        return room
