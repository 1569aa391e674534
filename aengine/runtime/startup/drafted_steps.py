"""Steps with drafts that start-up runs. They write into page 0, which belongs to no sequence."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

import msgspec
import torch

from aengine.config import EngineConfig
from aengine.kernels.attention.config import decode_borders
from aengine.kernels.launch import Launch
from aengine.kernels.linear.small_linear import ROW_BORDERS
from aengine.model.config import DraftModel, ModelConfig
from aengine.model.families.heads import DFlashSpec
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.speculation.runs import prepared_drafts
from aengine.runtime.startup.borders import head_borders, output_borders
from aengine.runtime.startup.warm_up import GREEDIEST, PLAIN, largest_steps, prompts_in_page_0
from aengine.step_plan import StepPlan

# With penalties, a row draws its places one after the other. Without them, all places are drawn at once.
AT_ONCE = msgspec.structs.replace(GREEDIEST, repetition_penalty=1.0, presence_penalty=0.0)


def drafted_steps(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, launch: Launch, max_step_tokens: int,
    max_model_len: int, most_drafts: int,
) -> list[StepPlan]:  # fmt: skip
    """Return steps that launch all kernels of a draft head, of the verification of drafts, and of their draws.

    A prefill step precedes each step with drafts. The list is empty without speculation.
    """
    most = _fitting(config, max_model_len, most_drafts)
    if not most_drafts:
        return []
    rows = min(config.max_num_seqs, max_step_tokens)
    draws = min(rows * (1 + most), max_step_tokens)
    borders = {*ROW_BORDERS, *(2**power + 1 for power in range(6, draws.bit_length()))}
    of_rows = {*borders, *decode_borders(launch, rows), *head_borders(model, dtype, launch, rows), rows}
    of_draws = {*borders, *range(1, most + 2), *output_borders(model, launch, draws), draws}
    batches = [_of_rows(count, most, max_step_tokens) for count in sorted(of_rows) if count <= rows]
    batches += [_of_draws(count, most) for count in sorted(of_draws) if count <= draws]
    reads_states = model.drafting or model.added_head is not None  # otherwise plain decodes are captured
    unique = dict.fromkeys(batch for batch in batches if len(batch) <= rows and (reads_states or any(batch)))
    filtered = SamplingParams(top_p=0.9)
    steps = [step for batch in unique for params in (PLAIN, filtered) for step in _verified(batch, params, most)]
    steps += _block_steps(model, dtype, launch, rows, most_drafts)
    return steps + [step for params in (GREEDIEST, AT_ONCE) for step in _verified((most,), params, most)]


def largest_drafted_steps(
    config: EngineConfig, max_step_tokens: int, max_model_len: int, most_drafts: int
) -> list[StepPlan]:
    """Return a step that draws at as many places as possible, with plain draws and with every option."""
    most = _fitting(config, max_model_len, most_drafts)
    if not most_drafts:
        return []
    batch = _of_rows(min(config.max_num_seqs, max_step_tokens), most, max_step_tokens)
    return [step for params in (PLAIN, AT_ONCE) for step in _verified(batch, params, most)]


def trial_steps(config: EngineConfig, max_step_tokens: int, longest: int, most_drafts: int) -> list[StepPlan]:
    """Return the steps that need the most memory. Prompts have pages of their own.

    longest: the most tokens of a row.
    """
    largest = proposing(largest_steps(config, max_step_tokens, longest), most_drafts)
    return largest + largest_drafted_steps(config, max_step_tokens, longest, most_drafts)


def proposing(steps: Iterable[StepPlan], most_drafts: int) -> list[StepPlan]:
    """Return the steps, with rows that make drafts for their next step."""
    return [msgspec.structs.replace(step, proposals=most_drafts) for step in steps]


def _fitting(config: EngineConfig, max_model_len: int, most_drafts: int) -> int:
    """Return how many drafts fit into a row's pages after a prompt and its last token."""
    return max(0, min(most_drafts, -(-max_model_len // config.page_size) * config.page_size - 2))


def _block_steps(model: ModelConfig, dtype: torch.dtype, launch: Launch, rows: int, most: int) -> list[StepPlan]:
    """Return steps that launch all kernels of a head that drafts blocks. Empty for other proposers.

    rows: the most rows of a step.
    """
    head = model.added_head
    if head is None or isinstance(head, DraftModel) or not head.drafts_blocks:
        return []
    # A block of DFlash also has the row's last token. P-EAGLE has no mask for the first draft.
    more, fewer = (1, 0) if isinstance(head, DFlashSpec) else (-1, 1)
    powers = {2**power for power in range((rows * (1 + most)).bit_length())}
    borders = sorted({*ROW_BORDERS, *powers, *head_borders(model, dtype, launch, rows * (1 + most))})
    row_borders = sorted({*powers, *decode_borders(launch, rows)})
    steps, known = list[StepPlan](), set[tuple[str | int, int]]()
    for count, drafts in itertools.product(range(1, rows + 1), range(1 + fewer, most + 1)):
        queries = prepared_drafts(drafts, most) + more
        launched: set[tuple[str | int, int]] = {
            ("tokens", bisect.bisect_left(borders, count * queries)),
            ("masks", bisect.bisect_left(borders, count * (drafts - fewer))),
            (queries, bisect.bisect_left(row_borders, count)),
        }
        if not launched <= known:
            known |= launched
            steps += proposing([prompts_in_page_0(count, PLAIN)], drafts)
    return steps


def _of_rows(rows: int, most: int, max_step_tokens: int) -> tuple[int, ...]:
    """Return the drafts of each row: as many as a step can have."""
    room = max(0, max_step_tokens - rows)
    return tuple(min(most, max(0, room - before * most)) for before in range(rows))[::-1]


def _of_draws(draws: int, most: int) -> tuple[int, ...]:
    """Return the drafts of as few rows as possible that draw at this many places."""
    full, rest = divmod(draws, 1 + most)
    return (*([rest - 1] if rest else []), *[most] * full)


def _verified(batch: tuple[int, ...], params: SamplingParams, most: int) -> list[StepPlan]:
    """Return a step with prompts of one token, and a step in which their rows verify drafts."""
    prompts = prompts_in_page_0(len(batch), params)
    drafted = StepPlan(
        step=0, new_rows=[], new_pages=[], decode=list(range(len(batch))), prefill=[], page_copies=[],
        drafts=batch if any(batch) else (), contexts=[2 + drafts for drafts in batch],
    )  # fmt: skip
    return proposing([prompts, drafted], most)
