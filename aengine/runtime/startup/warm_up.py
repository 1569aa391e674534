"""Steps that start-up runs, so that no kernel is compiled or loaded while serving.

All but the largest steps write into page 0, which belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from aengine.attention.flash4 import LEAST_GATHERING
from aengine.config import EngineConfig
from aengine.kernels.attention.config import decode_borders
from aengine.kernels.collective.config import sum_borders
from aengine.kernels.collective.mailboxes import LANE
from aengine.kernels.launch import Launch
from aengine.kernels.linear.small_linear import ROW_BORDERS
from aengine.model.config import ModelConfig
from aengine.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from aengine.runtime.cuda.capture import GraphSizes
from aengine.runtime.startup.borders import head_borders, layer_borders
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

PLAIN = SamplingParams()
# Sets every option for which a step allocates extra memory.
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


def with_adapters(steps: Sequence[StepPlan], lora: bool) -> list[StepPlan]:
    """Return the steps. If `lora` is True, copies of them come first, with an adapter in every row."""
    if not lora:
        return list(steps)
    adapted = [
        msgspec.structs.replace(step, new_rows=[msgspec.structs.replace(new, adapter=1) for new in step.new_rows])
        for step in steps
    ]
    return [*adapted, *steps]


def row_share(config: EngineConfig, max_step_tokens: int, longest: int) -> tuple[int, int]:
    """Return the tokens and pages of each row when all rows share the largest step."""
    length = min(-(-max_step_tokens // config.max_num_seqs), longest)
    return length, -(-length // config.page_size)


def largest_steps(config: EngineConfig, max_step_tokens: int, longest: int) -> list[StepPlan]:
    """Return the largest step twice: with plain draws, and with every option. Its rows have separate pages."""
    length, pages_per_row = row_share(config, max_step_tokens, longest)
    return [
        _largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens, params)
        for params in (PLAIN, GREEDIEST)
    ]


def uncaptured_steps(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, launch: Launch, max_step_tokens: int,
    max_model_len: int, sizes: GraphSizes, most_drafts: int = 0,
) -> list[StepPlan]:  # fmt: skip
    """Return steps that launch all kernels which captured steps do not launch.

    dtype: the model's dtype. most_drafts: the drafts that each row makes for its next step.
    """
    narrow = narrow_steps(config, max_step_tokens, max_model_len)
    steps = [*narrow, short_chunks(config, max_step_tokens, max_model_len)]
    widest = widest_step(config, max_step_tokens, max_model_len)
    if config.kv_cache_gib is not None:  # otherwise start-up runs the largest step anyway
        steps.append(widest)
    if not sizes.decode:
        steps += decode_steps(config, launch, max_step_tokens) + long_chunks(config, max_step_tokens, max_model_len)
    launched = {*sizes.decode, *sizes.prefill, widest.num_tokens, *(step.num_tokens for step in steps)}
    borders = layer_borders(model, dtype, launch, max_step_tokens)
    if model.lora is not None:
        from aengine.kernels.lora.config import adapter_borders  # imports the kernels of adapters

        borders |= set(adapter_borders(model.lora.places + 1, launch, max_step_tokens))
    if model.ranks > 1:
        borders |= set(sum_borders(model.hidden_size * dtype.itemsize // LANE, model.ranks, max_step_tokens))
    steps += border_steps(config, max_step_tokens, max_model_len, borders, launched)
    if _ends_in_new_parts(model):
        launched = {*sizes.decode, *(step.num_tokens for step in narrow)}
        steps += border_steps(config, max_step_tokens, max_model_len, borders, launched, GREEDIEST)
    # A draft head is not captured.
    borders = head_borders(model, dtype, launch, max_step_tokens)
    steps += border_steps(config, max_step_tokens, max_model_len, borders, {step.num_tokens for step in steps})
    for step in steps:
        step.proposals = most_drafts
    return steps


def _ends_in_new_parts(model: ModelConfig) -> bool:
    """Return whether a kind of feed-forward part is only after the last attention.

    There, most steps compute only the tokens that draw. Scored steps compute all tokens.
    """
    last = max(i for i, layer in enumerate(model.layers) if layer.attention is not None)
    before = [layer.ffn for layer in model.layers[:last]]
    return any(layer.ffn is not None and layer.ffn not in before for layer in model.layers[last:])


def border_steps(
    config: EngineConfig,
    max_step_tokens: int,
    max_model_len: int,
    borders: Collection[int],
    launched: Collection[int],
    params: SamplingParams = PLAIN,
) -> list[StepPlan]:
    """Return a step for each range between two borders in which no step is launched. All are numbers of tokens."""
    steps, last = [], 0
    most = min(max_step_tokens, config.max_num_seqs * max_model_len)
    for border in sorted({most, *(border for border in borders if border < most)} if borders else ()):
        if not any(last < tokens <= border for tokens in launched):
            rows = -(-border // max_model_len)
            length = -(-border // rows)
            pages = -(-length // config.page_size)
            steps.append(_in_page_0(_largest_step(rows, length, pages, border, params)))
        last = border
    return steps


def greediest_largest_step(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """Return the step that takes the most memory."""
    return _in_page_0(largest_steps(config, max_step_tokens, max_model_len)[-1])


def greediest_steps() -> list[StepPlan]:
    """Return steps of one row and one token whose draw has every option, with and without filters."""
    return [
        _in_page_0(_largest_step(1, 1, 1, 1, params))
        for params in (GREEDIEST, msgspec.structs.replace(GREEDIEST, top_p=1.0))
    ]


def narrow_steps(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """Return one scored prompt for each kernel of matrix products with few rows."""
    lengths = sorted({min(border, max_step_tokens, max_model_len) for border in ROW_BORDERS})
    return [one_prompt(config, length, GREEDIEST) for length in lengths]


def short_chunks(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """Return a step with prompts in all rows. It has just enough tokens that keys are gathered from their pages."""
    rows = min(config.max_num_seqs, LEAST_GATHERING, max_step_tokens)
    length = min(-(-LEAST_GATHERING // rows), max_step_tokens, max_model_len)
    pages = -(-length // config.page_size)
    return _in_page_0(_largest_step(rows, length, pages, max_step_tokens, PLAIN))


def long_chunks(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """Return a step whose keys are read in their pages, and a step whose keys are gathered from their pages."""
    lengths = {min(tokens, max_step_tokens, max_model_len) for tokens in (LEAST_GATHERING - 1, LEAST_GATHERING)}
    return [one_prompt(config, length, PLAIN) for length in sorted(lengths)]


def decode_steps(config: EngineConfig, launch: Launch, max_step_tokens: int) -> list[StepPlan]:
    """Return decode steps for each kind of kernel, with and without filters. A prefill step precedes each of them.

    They replace the captured steps if there are no graphs.
    """
    most = min(config.max_num_seqs, max_step_tokens)
    # Kernels for many rows are compiled for each power of two.
    beyond = [2**power + 1 for power in range(6, most.bit_length())]
    steps = []
    for rows in sorted({min(size, most) for size in (*decode_borders(launch, most), *ROW_BORDERS, *beyond, most)}):
        for params in (PLAIN, SamplingParams(top_p=0.9)):
            prompts = prompts_in_page_0(rows, params)
            decode = StepPlan(step=0, new_rows=[], new_pages=[], decode=list(range(rows)), prefill=[], page_copies=[])
            steps += [prompts, decode]
    return steps


def widest_step(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """Return a step with the most tokens and rows."""
    return _in_page_0(largest_steps(config, max_step_tokens, max_model_len)[0])


def one_prompt(config: EngineConfig, length: int, params: SamplingParams) -> StepPlan:
    """Return a step with one prompt of `length` tokens."""
    return _in_page_0(_largest_step(1, length, -(-length // config.page_size), length, params))


def prompts_in_page_0(rows: int, params: SamplingParams) -> StepPlan:
    """Return a step in which rows prefill one token each and draw."""
    return _in_page_0(_largest_step(rows, 1, 1, rows, params))


def _in_page_0(step: StepPlan) -> StepPlan:
    for new in step.new_rows:
        new.pages = [0] * len(new.pages)
    return step


def _largest_step(rows: int, length: int, pages_per_row: int, max_step_tokens: int, params: SamplingParams) -> StepPlan:
    """Return a step in which rows prefill `length` tokens each and draw. The last row takes the remaining tokens."""
    total = min(rows * length, max_step_tokens)
    lengths = [min(length, total - before) for before in range(0, total, length)]
    new_rows = [
        NewRow(
            row=row,
            params=params,
            seed=row,
            stop_ids=(0,),
            prompt_len=tokens,
            tokens=[0] * tokens,
            length=0,
            pages=list(range(1 + row * pages_per_row, 1 + (row + 1) * pages_per_row)),
        )
        for row, tokens in enumerate(lengths)
    ]
    # Only one prompt is scored. Scores of further prompts would reuse the same memory.
    scored = 0 if params.prompt_logprobs is None else lengths[0]
    prefill = [
        PrefillChunk(
            row=row,
            start=0,
            token_ids=[0] * tokens,
            samples=True,
            score_ids=[0] * scored if row == 0 else [],
            top=params.prompt_logprobs or 0,
        )
        for row, tokens in enumerate(lengths)
    ]
    return StepPlan(step=0, new_rows=new_rows, new_pages=[], decode=[], prefill=prefill, page_copies=[])
