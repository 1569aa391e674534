"""One step as the scheduler plans it for the runtime, and what the step drew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from aengine.requests.sampling_params import SamplingParams
from aengine.types import PromptLogprob

NewPage = tuple[int, int, int]  # (row, index in the row's page table, page)


class NewRow(msgspec.Struct):
    """A device row given to a sequence, effective before the step's forward pass."""

    row: int
    params: SamplingParams
    seed: int  # 64 bits, already derived from (seed, sibling index)
    stop_ids: tuple[int, ...]  # what min_tokens masks: EOS (unless ignored) and stop_token_ids
    prompt_len: int  # the request's own prompt; output positions are counted from here
    tokens: Sequence[int]  # all ids known so far, prompt then output (penalties are rebuilt from them)
    length: int  # tokens whose KV is already in `pages`
    pages: list[int]
    banned: Sequence[Sequence[int]] = ()  # the output must never complete any of these
    # The row that it forks from, which is read to its end in this step: all but the seed is the same, and can be copied
    # on the device. Its whole pages are this row's too; `pages` is empty, and `new_pages` has what comes behind them.
    copy_of: int | None = None
    adapter: int = 0  # its place on the device; 0: none
    near: bool = False  # whether longrope's short factors rotate it, as it never leaves the trained context
    # Of layers with a window, where they have pages of their own: all of them, those of a row that forks as well. Where
    # no query will look again they are page 0.
    window_pages: Sequence[int] = ()


class Pool(msgspec.Struct, frozen=True):
    """What is taken of a prompt in place of draws, as float32 numbers.

    `last`: the last token's hidden state; `mean`: the sum of those of each chunk; `classes`: what the classification
    head makes of the last token; `tokens`: the last token's logits of `token_ids`, as many in every request of a model.
    """

    kind: Literal["last", "mean", "classes", "tokens"]
    token_ids: tuple[int, ...] = ()

    @property
    def of_all_tokens(self) -> bool:
        """Whether every token has to pass through the model, so that no cached prefix will do."""
        return self.kind == "mean"


class PrefillChunk(msgspec.Struct):
    """Consecutive known tokens of one row that go through the model in this step."""

    row: int
    start: int  # position of the first one; equals the row's length before the step
    token_ids: Sequence[int]
    samples: bool  # the last chunk draws a token; earlier ones neither sample nor count
    forks: Sequence[int] = ()  # rows of siblings that draw from the same logits (n > 1)
    score_ids: Sequence[int] = ()  # the prompt's next token for each of the first ones: how likely was it?
    top: int = 0  # candidates beside each score
    pool: Pool | None = None  # what is taken of this chunk; a prompt that is pooled draws nothing
    # Of a model with recurrent layers: (how many of the chunk's tokens, the slot that keeps the state behind them).
    saves: Sequence[tuple[int, int]] = ()


MOST_SHARED_RUNS = 16  # in one step


class SharedRun(msgspec.Struct):
    """Decode rows whose contexts begin with the same tokens, in pages of equal content."""

    members: list[int]  # places in `StepPlan.decode`
    tokens: int  # whole pages, fewer than any member's context


class MixedLimit(msgspec.Struct, frozen=True):
    """Bounds a step with prompt tokens beside decodes: running streams wait for as long as it takes."""

    tokens: int  # decodes and prompt tokens, of which one at position p counts as 1 + p / context
    context: float  # so many keys cost a token as much as everything else does
    multiple: int  # a prompt that is cut is cut where the step has a multiple of so many tokens


class StepPlan(msgspec.Struct):
    """Everything the runtime needs to run one step.

    Order of effect: `new_rows` (copies after what they copy), `new_pages` and `new_window_pages`, `state_loads`,
    forward over `decode` (one token each: the one that the row sampled last, still on the device) and `prefill`,
    `state_copies` in their order, draws, then `page_copies` and `window_copies`. Draws come back in the order:
    `decode`, then each sampling chunk's row followed by its forks.
    """

    step: int
    new_rows: list[NewRow]
    new_pages: list[NewPage]
    decode: list[int]  # rows
    prefill: list[PrefillChunk]
    page_copies: list[tuple[int, int]]  # (source page, destination page), all layers, after the forward pass
    shared: Sequence[SharedRun] = ()  # disjoint; a hint that spares reading, never a condition
    # Whole slots of recurrent states, (source, destination) each: before the forward pass, and after it.
    state_loads: list[tuple[int, int]] = []
    state_copies: list[tuple[int, int]] = []
    # The same as `new_pages` and `page_copies` for layers with a window that have pages of their own. Page 0: no query
    # will look there again.
    new_window_pages: list[NewPage] = []
    window_copies: list[tuple[int, int]] = []
    structured: bool = False  # some draw has a grammar: the draws wait for its mask, which needs the tokens before

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that draw, in the order of the results."""
        rows = list(self.decode)
        for chunk in self.prefill:
            if chunk.samples:
                rows.append(chunk.row)
                rows.extend(chunk.forks)
        return rows

    @property
    def scoring(self) -> bool:
        """Whether a chunk has prompt logprobs to compute."""
        return any(chunk.score_ids for chunk in self.prefill)

    @property
    def pooled(self) -> int:
        """The number of chunks of which something is taken that is no draw."""
        return sum(chunk.pool is not None for chunk in self.prefill)

    @property
    def of_all_tokens(self) -> bool:
        """Whether more is wanted of a chunk than its last token's hidden state."""
        return any(chunk.score_ids or (chunk.pool and chunk.pool.of_all_tokens) for chunk in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode) + sum(len(chunk.token_ids) for chunk in self.prefill)


class RowLogprobs(msgspec.Struct):
    """Logprobs of one draw under the raw distribution, likeliest first."""

    sampled: float
    top_ids: list[int]
    top: list[float]


class StepResult(msgspec.Struct):
    """What a step drew, one entry per row of `StepPlan.sampled_rows`, in that order."""

    token_ids: list[int]
    finite: list[bool]  # False: the row's logits held NaN or +infinity; its token id means nothing
    logprobs: list[RowLogprobs | None] | None  # None when no row asked for them
    scores: Sequence[Sequence[PromptLogprob]] = ()  # a list for each chunk with `score_ids`, in the plan's order
    finite_chunks: Sequence[bool] = ()  # for each chunk, whether what it wrote into its pages is finite; (): all of it
    pooled: Sequence[array[float] | None] = ()  # float32, for each chunk with a `pool`; None: not finite
