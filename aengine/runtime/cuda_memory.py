"""How much of a CUDA device's memory the KV pool may have: what is left once everything else has had its most."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from aengine.cache.kv import KVPool
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.decode_config import DECODE_BORDERS
from aengine.kernels.small_linear import ROW_BORDERS
from aengine.model.decoder import Decoder
from aengine.runtime.cuda_runner import GraphedExecutor
from aengine.types import MAX_LOGPROBS, NewRow, PrefillChunk, SamplingParams, StepPlan

MARGIN = 256 * 2**20  # what libraries allocate on first use, beyond what a trial step shows
GIB = 2.0**30

# Everything at once that takes memory of its own.
GREEDIEST = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
    logit_bias={0: 1.0},
    min_tokens=1,
    allowed_token_ids=(0,),
)


def room_for_kv(
    config: EngineConfig,
    decoder: Decoder,
    max_step_tokens: int,
    make: Callable[[int, int], GraphedExecutor],
    capture: Callable[[GraphedExecutor, bool], None],
    more_graphs: int,
) -> int:
    """Bytes for the KV pool. Raises `ConfigError` with the arithmetic where nothing is left.

    Runs the largest step, once with the plainest and once with the greediest sampling, and captures the largest graphs,
    over `make(num_pages, max_model_len)`, and looks at what that took. more_graphs: bytes of those not captured here.
    From then on the process may not allocate more than its budget: torch empties its own cache before it would.
    """
    device, model = decoder.device, decoder.config
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization)
    others = total - free - torch.cuda.memory_reserved(device)  # other processes, and this one's CUDA context
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    weights = torch.cuda.memory_allocated(device)
    # No longer than the rotary table.
    length, pages_per_row = _each_row(config, max_step_tokens, config.max_model_len or model.max_position_embeddings)
    num_pages = config.max_num_seqs * pages_per_row + 1
    pool = num_pages * KVPool.bytes_per_page(
        model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, decoder.dtype
    )
    trial = make(num_pages, length)
    torch.cuda.reset_peak_memory_stats(device)
    for params in (SamplingParams(), GREEDIEST):
        trial.execute(_largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens, params))
    torch.cuda.current_stream(device).synchronize()
    step = torch.cuda.max_memory_allocated(device) - weights - pool
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    capture(trial, False)
    graphs = before - torch.cuda.mem_get_info(device)[0] + more_graphs
    del trial
    torch.cuda.empty_cache()
    held = total - torch.cuda.mem_get_info(device)[0]  # by others, by weights and by code that is loaded now
    room = budget - held - step - graphs - MARGIN
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization: the model does not fit. Of {budget / GIB:.1f} GiB "
            f"({config.gpu_memory_utilization:.0%} of the device) others use {others / GIB:.1f}, the weights "
            f"{weights / GIB:.1f}, the largest step {step / GIB:.1f}, the graphs {graphs / GIB:.1f}: nothing is left "
            f"for the KV pool. Raise it, lower max_step_tokens or max_num_seqs, or take a smaller model"
        )
    torch.cuda.set_per_process_memory_fraction((budget - others) / total, device)
    return room


def greediest_steps() -> list[StepPlan]:
    """One row, one token, which goes into page 0, and a draw with everything that a draw can have; without filters."""
    return [
        _in_page_0(_largest_step(1, 1, 1, 1, params))
        for params in (GREEDIEST, msgspec.structs.replace(GREEDIEST, top_p=1.0))
    ]


def narrow_steps(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """One prompt of as many tokens as each kind of product of few rows takes, all scored, in page 0."""
    lengths = sorted({min(border, max_step_tokens, max_model_len) for border in ROW_BORDERS})
    return [
        _in_page_0(_largest_step(1, length, -(-length // config.page_size), length, GREEDIEST)) for length in lengths
    ]


def decode_steps(config: EngineConfig, max_step_tokens: int) -> list[StepPlan]:
    """Decodes of as many rows as each kind of kernel takes, drawn with and without filters, each behind its prompts.

    What graphs would have compiled, where there are none.
    """
    most = min(config.max_num_seqs, max_step_tokens)
    beyond = [2**power + 1 for power in range(6, most.bit_length())]  # kernels of many rows know their power of two
    steps = []
    for rows in sorted({min(size, most) for size in (*DECODE_BORDERS, *ROW_BORDERS, *beyond)}):
        for params in (SamplingParams(), SamplingParams(top_p=0.9)):
            prompts = _in_page_0(_largest_step(rows, 1, 1, rows, params))
            decode = StepPlan(step=0, new_rows=[], new_pages=[], decode=list(range(rows)), prefill=[], page_copies=[])
            steps += [prompts, decode]
    return steps


def widest_step(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """As many tokens and rows as one step may carry; all of them go into page 0."""
    length, pages_per_row = _each_row(config, max_step_tokens, max_model_len)
    return _in_page_0(_largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens, SamplingParams()))


def _each_row(config: EngineConfig, max_step_tokens: int, longest: int) -> tuple[int, int]:
    """Tokens and pages of each row where all rows share the largest step."""
    length = min(-(-max_step_tokens // config.max_num_seqs), longest)
    return length, -(-length // config.page_size)


def _in_page_0(step: StepPlan) -> StepPlan:
    """The page that nobody owns and nobody reads."""
    for new in step.new_rows:
        new.pages = [0] * len(new.pages)
    return step


def _largest_step(rows: int, length: int, pages_per_row: int, max_step_tokens: int, params: SamplingParams) -> StepPlan:
    """Every row at once prefills `length` tokens and draws, as many as one step may carry."""
    rows = min(rows, max(1, max_step_tokens // length))
    new_rows = [
        NewRow(
            row=row,
            params=params,
            seed=row,
            stop_ids=(0,),
            prompt_len=length,
            tokens=[0] * length,
            length=0,
            pages=list(range(1 + row * pages_per_row, 1 + (row + 1) * pages_per_row)),
        )
        for row in range(rows)
    ]
    scored = 0 if params.prompt_logprobs is None else length
    prefill = [
        PrefillChunk(
            row=row,
            start=0,
            token_ids=[0] * length,
            samples=True,
            score_ids=[0] * scored,
            top=params.prompt_logprobs or 0,
        )
        for row in range(rows)
    ]
    return StepPlan(step=0, new_rows=new_rows, new_pages=[], decode=[], prefill=prefill, page_copies=[])
