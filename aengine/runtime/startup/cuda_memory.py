"""How much of a CUDA device's memory the KV pool may have: what is left once everything else has had its most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.capture import capture
from aengine.runtime.cuda.runner import GraphedExecutor
from aengine.runtime.startup.warm_up import largest_steps, row_share

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
    decoder: Decoder,
    max_step_tokens: int,
    make: Callable[[int, int], GraphedExecutor],
    more_graphs: int,
) -> int:
    """Bytes for the KV pool. Raises `ConfigError` with the arithmetic where nothing is left.

    Runs the largest step, once with the plainest and once with the greediest sampling, and captures the largest graphs,
    over `make(num_pages, max_model_len)`, and looks at what that took. more_graphs: bytes of those not captured here.
    From then on the process may not allocate more than its budget: torch empties its own cache before it would.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    device = decoder.device
    budget = Budget.of(device, config.gpu_memory_utilization)
    weights = torch.cuda.memory_allocated(device)
    num_pages, length = trial_pool(config, decoder, max_step_tokens)
    pool = num_pages * decoder.config.kv_shape(config.page_size, decoder.kv_dtype).page_bytes
    try:
        trial = make(num_pages, length)
        torch.cuda.reset_peak_memory_stats(device)
        for plan in largest_steps(config, max_step_tokens, length):
            trial.execute(plan)
        torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_step_tokens: a step of {max_step_tokens} tokens and {config.max_num_seqs} rows does not fit beside "
            f"the weights ({weights / GIB:.1f} of {budget.total / GIB:.1f} GiB); lower max_step_tokens or max_num_seqs"
        ) from error
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    capture(trial)
    graphs = before - torch.cuda.mem_get_info(device)[0] + more_graphs
    del trial
    torch.cuda.empty_cache()
    # By others, by weights, by code that is loaded now and by what kernels keep between steps: keys out of their pages.
    held = budget.total - torch.cuda.mem_get_info(device)[0]
    step = peak - pool - torch.cuda.memory_allocated(device)
    room = budget.ours - held - step - graphs - MARGIN
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization: the model does not fit. Of {budget.ours / GIB:.1f} GiB "
            f"({config.gpu_memory_utilization:.0%} of the device) others use {budget.others / GIB:.1f}, the weights "
            f"{weights / GIB:.1f}, the largest step {step / GIB:.1f}, the graphs {graphs / GIB:.1f}: nothing is left "
            f"for the KV pool. Raise it, lower max_step_tokens or max_num_seqs, or take a smaller model"
        )
    torch.cuda.set_per_process_memory_fraction((budget.ours - budget.others) / budget.total, device)
    return room
