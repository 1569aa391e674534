"""Steps that a start-up runs before anyone asks, so that no kind of step is the first of its kind later.

All but the largest ones write into page 0, which nobody owns and nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import msgspec
import torch

from aengine.attention.flash4 import LEAST_GATHERING
from aengine.config import EngineConfig
from aengine.kernels.attention.config import decode_borders
from aengine.kernels.collective.config import sum_borders
from aengine.kernels.collective.mailboxes import LANE
from aengine.kernels.experts.config import experts_borders
from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8.config import fp8_borders
from aengine.kernels.linear.gated_rows import fewest_rows
from aengine.kernels.linear.int4.config import DENSE_ROWS, int4_borders
from aengine.kernels.linear.small_linear import ROW_BORDERS
from aengine.kernels.lora.config import adapter_borders
from aengine.model.config import ModelConfig
from aengine.model.spec import ExpertsSpec, MLPAndExpertsSpec
from aengine.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from aengine.runtime.cuda.capture import GraphSizes
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

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


def with_adapters(steps: Sequence[StepPlan], lora: bool) -> list[StepPlan]:
    """The steps, and where there are adapters the same once more with an adapter in every row."""
    if not lora:
        return list(steps)
    adapted = [
        msgspec.structs.replace(step, new_rows=[msgspec.structs.replace(new, adapter=1) for new in step.new_rows])
        for step in steps
    ]
    return [*adapted, *steps]


def row_share(config: EngineConfig, max_step_tokens: int, longest: int) -> tuple[int, int]:
    """Tokens and pages of each row where all rows share the largest step."""
    length = min(-(-max_step_tokens // config.max_num_seqs), longest)
    return length, -(-length // config.page_size)


def largest_steps(config: EngineConfig, max_step_tokens: int, longest: int) -> list[StepPlan]:
    """As many tokens and rows as one step may carry, in pages of their own: drawn plainly, then with everything."""
    length, pages_per_row = row_share(config, max_step_tokens, longest)
    return [
        _largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens, params)
        for params in (SamplingParams(), GREEDIEST)
    ]


def uncaptured_steps(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, launch: Launch, max_step_tokens: int,
    max_model_len: int, sizes: GraphSizes,
) -> list[StepPlan]:  # fmt: skip
    """What steps need that fit none of the captured sizes. dtype: of the model as it is loaded."""
    steps = narrow_steps(config, max_step_tokens, max_model_len)
    steps.append(short_chunks(config, max_step_tokens, max_model_len))
    widest = widest_step(config, max_step_tokens, max_model_len)
    if config.kv_cache_gib is not None:  # else sizing has run the largest
        steps.append(widest)
    if not sizes.decode:
        steps += decode_steps(config, launch, max_step_tokens) + long_chunks(config, max_step_tokens, max_model_len)
    launched = {*sizes.decode, *sizes.prefill, widest.num_tokens, *(step.num_tokens for step in steps)}
    borders = {
        border
        for ffn in (layer.ffn for layer in model.layers)
        for spec in (ffn.experts if isinstance(ffn, MLPAndExpertsSpec) else ffn,)
        if isinstance(spec, ExpertsSpec)
        for border in experts_borders(spec.router.top_k, spec.count, model.hidden_size, launch, max_step_tokens)
    }
    kinds = [kind for kind, there in ((fp8_borders, model.fp8), (int4_borders, model.int4)) if there]
    shapes = {shape for layer in model.layers for shape in layer.linears(model.hidden_size, model.ranks)}
    borders |= {border for kind in kinds for n, k in shapes for border in kind(n, k, launch, max_step_tokens)}
    # Gate and up as one, then down.
    gates = {shape for layer in model.layers for shape in layer.ffn.linears(model.hidden_size, model.ranks)[::2]}
    for (outputs, inputs), least in itertools.product(gates, {1, DENSE_ROWS if model.int4 else 1}):
        rows = range(least, max_step_tokens + 1)
        first = fewest_rows(outputs // 2, inputs, dtype.itemsize, launch, rows)
        if first is not None:  # some larger steps go without the kernel again, so it is this one that is launched
            for whole in {first, min(2, model.ranks) * first}:  # or in halves
                borders |= {whole - 1, whole}
    if model.lora is not None:
        borders |= set(adapter_borders(model.lora.places + 1, launch, max_step_tokens))
    if model.ranks > 1:
        borders |= set(sum_borders(model.hidden_size * dtype.itemsize // LANE, model.ranks, max_step_tokens))
    return steps + border_steps(config, max_step_tokens, max_model_len, borders, launched)


def border_steps(
    config: EngineConfig, max_step_tokens: int, max_model_len: int, borders: Collection[int], launched: Collection[int]
) -> list[StepPlan]:
    """Prompts of as many tokens as each border says, unless a number up to there and beyond the last is launched."""
    steps, last = [], 0
    most = min(max_step_tokens, config.max_num_seqs * max_model_len)
    for border in sorted({most, *(border for border in borders if border < most)} if borders else ()):
        if not any(last < tokens <= border for tokens in launched):
            rows = -(-border // max_model_len)
            length = -(-border // rows)
            pages = -(-length // config.page_size)
            steps.append(_in_page_0(_largest_step(rows, length, pages, border, SamplingParams())))
        last = border
    return steps


def greediest_largest_step(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """What takes the most memory that a step can take, and no graph holds."""
    return _in_page_0(largest_steps(config, max_step_tokens, max_model_len)[-1])


def greediest_steps() -> list[StepPlan]:
    """One row, one token, and a draw with everything that a draw can have; without filters."""
    return [
        _in_page_0(_largest_step(1, 1, 1, 1, params))
        for params in (GREEDIEST, msgspec.structs.replace(GREEDIEST, top_p=1.0))
    ]


def narrow_steps(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """One prompt of as many tokens as each kind of product of few rows takes, all scored."""
    lengths = sorted({min(border, max_step_tokens, max_model_len) for border in ROW_BORDERS})
    return [
        _in_page_0(_largest_step(1, length, -(-length // config.page_size), length, GREEDIEST)) for length in lengths
    ]


def short_chunks(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """As many prompts as there are rows, together just so many tokens that their keys are gathered."""
    rows = min(config.max_num_seqs, LEAST_GATHERING, max_step_tokens)
    length = min(-(-LEAST_GATHERING // rows), max_step_tokens, max_model_len)
    pages = -(-length // config.page_size)
    return _in_page_0(_largest_step(rows, length, pages, max_step_tokens, SamplingParams()))


def long_chunks(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """One prompt whose keys are read from their pages, and one whose keys are gathered."""
    lengths = {min(tokens, max_step_tokens, max_model_len) for tokens in (LEAST_GATHERING - 1, LEAST_GATHERING)}
    return [
        _in_page_0(_largest_step(1, length, -(-length // config.page_size), length, SamplingParams()))
        for length in sorted(lengths)
    ]


def decode_steps(config: EngineConfig, launch: Launch, max_step_tokens: int) -> list[StepPlan]:
    """Decodes of as many rows as each kind of kernel takes, drawn with and without filters, each behind its prompts.

    What graphs would have compiled, where there are none.
    """
    most = min(config.max_num_seqs, max_step_tokens)
    beyond = [2**power + 1 for power in range(6, most.bit_length())]  # kernels of many rows know their power of two
    steps = []
    for rows in sorted({min(size, most) for size in (*decode_borders(launch, most), *ROW_BORDERS, *beyond, most)}):
        for params in (SamplingParams(), SamplingParams(top_p=0.9)):
            prompts = _in_page_0(_largest_step(rows, 1, 1, rows, params))
            decode = StepPlan(step=0, new_rows=[], new_pages=[], decode=list(range(rows)), prefill=[], page_copies=[])
            steps += [prompts, decode]
    return steps


def widest_step(config: EngineConfig, max_step_tokens: int, max_model_len: int) -> StepPlan:
    """As many tokens and rows as one step may carry."""
    length, pages_per_row = row_share(config, max_step_tokens, max_model_len)
    return _in_page_0(_largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens, SamplingParams()))


def _in_page_0(step: StepPlan) -> StepPlan:
    for new in step.new_rows:
        new.pages = [0] * len(new.pages)
    return step


def _largest_step(rows: int, length: int, pages_per_row: int, max_step_tokens: int, params: SamplingParams) -> StepPlan:
    """Every row at once prefills `length` tokens and draws, as many as one step may carry; the last what is left."""
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
    # One prompt alone is scored: the others' scores come one after the other, in the same memory.
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
