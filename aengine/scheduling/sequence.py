"""A sequence of tokens and its phase: queued, on a row, being preempted, or done."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from aengine.cache.radix import Namespace, Node, packed
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.acceptance import Acceptance
from aengine.step_plan import Pool, RowLogprobs
from aengine.types import FinishReason, PromptLogprob


class Phase(enum.Enum):
    """The phase of a sequence. A PREEMPTED or FINISHED one keeps its row and pages until no step in flight names it."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Grammar(Protocol):
    """The part of an output's grammar state that the scheduler uses."""

    @property
    def late(self) -> bool:
        """Whether the next mask is still being computed. Until then no step carries the sequence."""
        ...

    @property
    def takes_drafts(self) -> bool:
        """Whether masks after drafts can be computed in time."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one committed token."""
        ...


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One loading of an adapter, and its place in the device's memory for adapters.

    Each loading gets a new generation number, even of the same files. So no cached prefix is used after a reload.
    """

    generation: int
    name: str = ""
    place: int = 0  # index in the device's memory for adapters; 0: not on the device
    ready: bool = False  # the weights are in the place, so rows may enter
    rows: int = 0  # number of rows that use the adapter; steps in flight may name its place for them
    # How many rows must still leave before the place is shut to new rows. None: the place is not claimed.
    until_shut: int | None = None

    def take_row(self) -> None:
        """Count a sequence that enters a row."""
        self.rows += 1

    def free_row(self) -> None:
        """Count a sequence that has left its row. No step in flight names the place for it."""
        self.rows -= 1
        if self.until_shut:
            self.until_shut -= 1


@dataclass(slots=True, eq=False)
class AdmittedPages:
    """The pages that a sequence was admitted with. Choices that fork from it share them."""

    node: Node  # locked: covers the pages that belong to the tree
    private: set[int]  # the pages that do not belong to the tree
    pages: int  # total number of pages, of the tree and private
    epoch: int  # the tree's epoch at admission
    holders: int = 1  # number of choices that hold the pages
    finite: bool = True  # False: some of their keys or values are NaN or infinite


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the output drawn so far. The scheduler owns every field but `owner`.

    `launched` counts tokens sent through the model by launched steps, `computed` by committed ones;
    `pending` draws are on the device; the host does not know them yet. Steps in flight may verify drafts: then
    `launched` and `pending` count all drafts, and the commit takes back those that were refused. The KV of the newest
    token may not be in the cache yet: the step that computes the token writes it.
    """

    prompt: array[int]  # never changes: the choices of a request share it
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # EOS (unless ignored) and stop_token_ids
    max_total: int  # tokens at which the sequence ends by length
    rank: tuple[float, int]  # place in the queue; smaller first
    salt: Namespace = None  # sequences with different salts share no cached prefix
    adapter: LoadedAdapter | None = None
    near: bool = False  # `NewRow.near`; sequences that differ in it also differ in `salt`
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not complete
    index: int = 0  # which of the n choices
    siblings: int = 0  # number of choices that will fork from this one after its prefill
    scores: list[PromptLogprob] = field(default_factory=list)  # from the prompt's second token on; siblings share it
    pool: Pool | None = None  # how to pool the prompt's hidden states; None: tokens are drawn
    pooled: list[array[float]] = field(default_factory=list)  # pooled vectors of the chunks so far
    owner: object = None  # set and used by the engine only
    speculates: bool = True  # whether it may verify drafts
    images: PromptImages | None = None
    encoded: int = 0  # its first images that need no more work: launched steps compute them, or they are cached
    encoded_blocks: int = 0  # blocks of the tower that these steps compute of the next image
    prompt_keys: array[int] | None = None  # the prompt with the keys of its images; None: it has no images
    acceptance: Acceptance | None = None  # of its drafts; None: none was verified yet
    grammar: Grammar | None = None  # has accepted exactly the committed output
    cached: int | None = None  # prompt tokens found in the tree at first admission
    tiers_searched: bool = False  # lower tiers were searched for its tokens since it was last queued
    from_host: int = 0  # tokens that were loaded from host memory for it
    from_disk: int = 0  # tokens that were loaded from a disk for it

    output: list[int] = field(default_factory=list)  # committed
    phase: Phase = Phase.WAITING
    prompt_len: int = 0
    max_output: int = 0  # tokens of output at which it ends by length
    row: int = -1
    pages: list[int] = field(default_factory=list)
    admitted: AdmittedPages | None = None  # None: it has no pages
    grown: set[int] = field(default_factory=set)  # the pages that were added after admission
    launched: int = 0
    computed: int = 0
    pending: int = 0  # draws or pooled vectors that are on the device, or an upper bound
    proposed: int = 0  # drafts for the next step that its last launched step has made on the device
    has_gap: bool = False  # the proposer did not read all of its steps since it got its row
    draft_ids: Seq[int] = ()  # drafts that its last committed step has made; only of a sequence with a grammar
    in_flight: int = 0  # launched steps that name it and are not committed
    decoding: bool = False  # its last chunk is launched; each further step reads the token drawn before
    has_stale_table: bool = False  # its page table on the device still names window pages that were freed
    shared_until: int = 0  # length of its longest prefix in the tree at admission, in tokens
    promised: int = 0  # number of pages that become available when it has left its row
    cacheable: bool = True  # False: a step of it failed, so its pages may not enter the tree
    stops: frozenset[int] = frozenset()  # `stop_ids` as a set

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.max_output = self.max_total - self.prompt_len
        self.stops = frozenset(self.stop_ids)

    @property
    def scoring(self) -> bool:
        """Whether prompt logprobs were requested and are not complete."""
        return self.params.prompt_logprobs is not None and len(self.scores) < self.prompt_len - 1

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token of the prompt must be computed, so that no cached prefix can be used."""
        return self.scoring or (self.pool is not None and self.pool.needs_all_tokens)

    @property
    def length(self) -> int:
        """The number of known tokens: the prompt and the committed output."""
        return self.prompt_len + len(self.output)

    def ids(self, start: int, end: int) -> array[int]:
        """Return the known tokens at positions start .. end - 1."""
        prompt_len = self.prompt_len
        if end <= prompt_len:
            return self.prompt[start:end]
        return self.prompt[start:] + packed(self.output[max(start - prompt_len, 0) : end - prompt_len])

    def keys(self, start: int, end: int) -> array[int]:
        """Return the known tokens at positions start .. end - 1 as the prefix cache compares them."""
        if self.prompt_keys is None:
            return self.ids(start, end)
        return self.prompt_keys[start:end] + self.ids(max(start, self.prompt_len), max(end, self.prompt_len))

    def cut(self, n_tokens: int) -> None:
        """Drop the output after its first `n_tokens`, which are its last. At least one token must remain.

        The last token does not count as computed. Its keys and values exist only if drafts after it were accepted. So
        prefixes in the cache end at the same token with and without drafts.
        """
        del self.output[n_tokens:]
        self.computed = min(self.computed, self.length - 1)


def sibling_of(leader: Sequence, index: int) -> Sequence:
    """Return another choice of the same request, with an empty output. Its prompt is not counted again."""
    return Sequence(
        prompt=leader.prompt,
        params=leader.params,
        seed=leader.seed,
        stop_ids=leader.stop_ids,
        max_total=leader.max_total,
        rank=leader.rank,
        salt=leader.salt,
        adapter=leader.adapter,
        near=leader.near,
        speculates=leader.speculates,
        images=leader.images,
        prompt_keys=leader.prompt_keys,
        banned=leader.banned,
        index=index,
        scores=leader.scores,
        cached=leader.prompt_len,
    )


class Update(msgspec.Struct, eq=False):
    """The effect of a committed step on one sequence: its new tokens, or the end of a pooled prompt."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: Seq[RowLogprobs | None] | None  # of the tokens, and perhaps of dropped ones; None if no row asked
    finish_reason: FinishReason | None  # why the sequence ends after the last token; None: it continues
    finite: bool = True  # False: the model produced NaN or infinity; there are no tokens
