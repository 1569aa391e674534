"""The plan of one step, from the scheduler to the runtime, and the step's result."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from aengine.prompt_images import PlacedImage, PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.types import PromptLogprob

NewPage = tuple[int, int, int]  # (row, index in the row's page table, page)


class NewRow(msgspec.Struct):
    """A device row given to a sequence, effective before the step's forward pass."""

    row: int
    params: SamplingParams
    seed: int  # 64 bits, already derived from (seed, sibling index)
    stop_ids: tuple[int, ...]  # masked until min_tokens: EOS (unless ignored) and stop_token_ids
    prompt_len: int  # of the request's own prompt; output positions count from here
    tokens: Sequence[int]  # all known ids, prompt then output; penalties are rebuilt from them
    length: int  # tokens whose KV is already in `pages`
    pages: list[int]
    banned: Sequence[Sequence[int]] = ()  # the output must never complete any of these
    # The row from which this one forks; its prompt is read to the end in this step. Everything except the seed is
    # equal, and can be copied on the device. Both rows share the full pages, so `pages` is empty. `new_pages` has the
    # pages after them.
    copy_of: int | None = None
    adapter: int = 0  # its slot on the device; 0: no adapter
    near: bool = False  # use longrope's short factors, because the request never leaves the trained context
    shift: int = 0  # added to the positions of tokens after the last image
    # All pages of layers with a window, if these have their own pages; also for a row that forks. Page 0 stands for
    # pages outside the window.
    window_pages: Sequence[int] = ()


class Pool(msgspec.Struct, frozen=True):
    """The output of a prompt that is pooled instead of drawing tokens, as float32 numbers.

    - `last`: the last token's hidden state.
    - `mean`: the sum of the hidden states of each chunk.
    - `classes`: the output of the classification head for the last token.
    - `tokens`: the last token's logits of `token_ids`. Every request of a model has the same number of them.
    """

    kind: Literal["last", "mean", "classes", "tokens"]
    token_ids: tuple[int, ...] = ()

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token must pass through the model, so that no cached prefix can be used."""
        return self.kind == "mean"


class PrefillChunk(msgspec.Struct):
    """Consecutive known tokens of one row that go through the model in this step."""

    row: int
    start: int  # position of the first token; equals the row's length before the step
    token_ids: Sequence[int]
    samples: bool  # whether the chunk draws a token: only the last chunk of a prompt does
    next_id: int = -1  # the token after the chunk; -1 if the chunk draws it
    forks: Sequence[int] = ()  # rows of siblings that draw from the same logits (n > 1)
    score_ids: Sequence[int] = ()  # prompt logprobs: the next token of each of the chunk's first tokens
    top: int = 0  # likeliest candidates with each score
    pool: Pool | None = None  # a pooled prompt draws no tokens
    # For recurrent layers: (number of the chunk's tokens, the slot that keeps the state after them).
    saves: Sequence[tuple[int, int]] = ()
    images: PromptImages | None = None  # of the whole prompt; None if the chunk begins after the last image


MOST_SHARED_RUNS = 16  # of one step


class SharedRun(msgspec.Struct):
    """Decode rows whose contexts begin with the same tokens, in pages of equal content."""

    members: list[int]  # indices into `StepPlan.decode`
    tokens: int  # a multiple of the page size, below every member's context


class MixedLimit(msgspec.Struct, frozen=True):
    """Bounds a step with both decodes and prompt tokens, because running streams wait while it runs."""

    tokens: int  # decodes and prompt tokens; a prompt token at position p counts as 1 + p / context
    context: float  # number of keys whose reading costs as much as the rest of a token's work
    multiple: int  # a cut prompt fills the step to a multiple of this many tokens


class ImageCost(msgspec.Struct, frozen=True):
    """How many tokens of text take as long as the tower's work on an image."""

    token: float  # for each token of the image
    pair: float  # for each pair of its tokens, in attention
    blocks: int  # of the tower; the work can be divided between them

    def of_block(self, image: PlacedImage) -> float:
        """Return the cost of one block."""
        tokens = image.rows * image.columns
        return tokens * (self.token + tokens * self.pair) / self.blocks


class ImageWork(msgspec.Struct, frozen=True):
    """A part of a tower's work on an image."""

    image: PlacedImage
    blocks: int = 0  # the tower computes so many more blocks; 0: all that are left


class StepPlan(msgspec.Struct):
    """Everything the runtime needs to run one step.

    Its parts take effect in this order:

    1. `new_rows` (a copy after its original), `new_pages` and `new_window_pages`, `state_loads`
    2. the forward pass over `decode` and `prefill`. A decode row computes the token that it sampled last, and then its
       drafts; all of these are on the device.
    3. `state_copies` in their order, draws, `page_copies` and `window_copies`

    The results are in the order of `decode`, then each sampling chunk's row followed by its forks.
    """

    step: int
    new_rows: list[NewRow]
    new_pages: list[NewPage]
    decode: list[int]  # rows
    prefill: list[PrefillChunk]
    page_copies: list[tuple[int, int]]  # (source page, destination page), all layers, after the forward pass
    shared: Sequence[SharedRun] = ()  # disjoint; only a hint, which saves reading
    # Copies of whole slots of recurrent states, (source, destination): loads before the forward pass, copies after it.
    state_loads: list[tuple[int, int]] = []
    state_copies: list[tuple[int, int]] = []
    # Like `new_pages` and `page_copies`, for layers with a window that have their own pages. Page 0 stands for pages
    # outside the window.
    new_window_pages: list[NewPage] = []
    window_copies: list[tuple[int, int]] = []
    # The images that the tower works on before the forward pass. An image of a chunk is computed even if it is missing
    # here, so this only divides the work.
    encodings: list[ImageWork] = []
    structured: bool = False  # a row has a grammar; draws wait for its mask, which depends on the tokens before
    # Like `PrefillChunk.saves`, for decoding rows of a model with drafts: (row, tokens, slot). The slot keeps the state
    # after the row's first `tokens` tokens if the step adds the last of them to the state. It may be a refused draft;
    # then a later step has the same entry. At most one entry for each row.
    state_saves: list[tuple[int, int, int]] = []
    # Speculation. `drafts`: how many drafts each row of `decode` verifies, rows without drafts first; empty: none does.
    # `contexts`: an upper bound of the length of each row of `decode` after the step; empty: each grows by one token.
    # `proposals`: the most drafts that each drawing row makes for its next step.
    drafts: Sequence[int] = ()
    contexts: Sequence[int] = ()
    # `is_read`: whether the proposer reads the step's tokens. If not, it makes no drafts, and later ones are worse.
    proposals: int = 0
    is_read: bool = True
    # The most drafts that a row may accept, by row. Set before the draws of a structured step: the draws after a draft
    # that its grammar refuses have no mask. A row without an entry may accept all its drafts.
    draft_limits: dict[int, int] = {}

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that draw, in the order of the results. A row that verifies drafts is named once."""
        rows = list(self.decode)
        for chunk in self.prefill:
            if chunk.samples:
                rows.append(chunk.row)
                rows.extend(chunk.forks)
        return rows

    @property
    def draw_rows(self) -> list[int]:
        """The row of each draw. A row with k drafts draws k + 1 times: each draft's place, and the place after it."""
        if not self.drafts:
            return self.sampled_rows
        places = [row for row, drafts in zip(self.decode, self.drafts, strict=True) for _ in range(drafts + 1)]
        return places + self.sampled_rows[len(self.decode) :]

    @property
    def decode_tokens(self) -> int:
        """The number of tokens of `decode`, drafts included."""
        return len(self.decode) + sum(self.drafts)

    @property
    def scoring(self) -> bool:
        """Whether a chunk has prompt logprobs to compute."""
        return any(chunk.score_ids for chunk in self.prefill)

    @property
    def pooled(self) -> int:
        """The number of pooled chunks."""
        return sum(chunk.pool is not None for chunk in self.prefill)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether some chunk needs more than its last token's hidden state."""
        return any(chunk.score_ids or (chunk.pool and chunk.pool.needs_all_tokens) for chunk in self.prefill)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model computes."""
        tokens = self.decode_tokens
        for chunk in self.prefill:
            tokens += len(chunk.token_ids)
        return tokens


class RowLogprobs(msgspec.Struct):
    """Logprobs of one draw under the raw distribution, likeliest first."""

    sampled: float
    top_ids: list[int]
    top: list[float]


class StepResult(msgspec.Struct):
    """A step's outputs for the rows of `StepPlan.sampled_rows`, in that order."""

    token_ids: list[int]  # the tokens of the first row, then those of the second, and so on
    finite: list[bool]  # for each row. False: its logits held NaN or +infinity; its token ids mean nothing
    logprobs: list[RowLogprobs | None] | None  # for each token; None when no row asked for them
    scores: Sequence[Sequence[PromptLogprob]] = ()  # a list for each chunk with `score_ids`, in the plan's order
    finite_chunks: Sequence[bool] = ()  # for each chunk, whether the KV that it wrote is finite; (): all are
    pooled: Sequence[array[float] | None] = ()  # float32, for each chunk with a `pool`; None: not finite
    # The number of tokens of each row: the accepted drafts and the token after them. Empty: each row has one token.
    counts: Sequence[int] = ()
    # The drafts that each row has made for its next step. Set if the step is structured: masks depend on the drafts.
    proposed: Sequence[Sequence[int]] = ()
