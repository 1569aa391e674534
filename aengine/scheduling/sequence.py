"""One sequence of tokens and where it stands: queued, on a row, being preempted, or done."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from aengine.cache.radix import Node
from aengine.text.grammar.grammars import Matcher
from aengine.types import FinishReason, PromptLogprob, RowLogprobs, SamplingParams


class Phase(enum.Enum):
    """`PREEMPTED` and `FINISHED` keep row and pages until no step in flight names them."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the output drawn so far. The scheduler owns every field but `owner`.

    `launched` counts tokens sent through the model by launched steps, `computed` by committed ones;
    `pending` draws are on the device and not yet known here. The KV of the newest token is never in
    the cache: it is written by the step that feeds it.
    """

    tokens: list[int]  # prompt, then committed output
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # EOS (unless ignored) and stop_token_ids
    max_total: int  # tokens at which the sequence ends by length
    rank: tuple[float, int]  # place in the queue; smaller first
    salt: str | None = None
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not complete
    index: int = 0  # which of the n choices
    siblings: list[Sequence] = field(default_factory=list)  # fork from this one after its prefill
    scores: list[PromptLogprob] = field(default_factory=list)  # from the prompt's second token on; siblings share it
    owner: object = None  # the caller's, untouched
    grammar: Matcher | None = None  # has seen the committed output, no more and no less

    phase: Phase = Phase.WAITING
    prompt_len: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    private: set[int] = field(default_factory=set)  # pages it holds a reference for; the rest are the tree's
    node: Node | None = None  # locked: covers the pages that are the tree's
    launched: int = 0
    computed: int = 0
    pending: int = 0
    in_flight: int = 0  # launched steps that name it and are not committed
    decoding: bool = False  # its last chunk is launched: from here on the row feeds what it drew
    cached: int | None = None  # prompt tokens found in the tree at first admission
    promised: int = 0  # pages that come back once it has left, while it is leaving
    tainted: bool = False  # its step failed: nothing of it may enter the tree
    stops: frozenset[int] = frozenset()  # `stop_ids`, for looking up

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.stops = frozenset(self.stop_ids)

    @property
    def scoring(self) -> bool:
        """Whether logprobs of the prompt are asked for and not all there yet; then no cached prefix will do."""
        return self.params.prompt_logprobs is not None and len(self.scores) < self.prompt_len - 1

    @property
    def output_len(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """Committed output ids."""
        return self.tokens[self.prompt_len :]


@dataclass(slots=True, eq=False)
class Update:
    """What one committed draw means for its sequence."""

    sequence: Sequence
    token_id: int
    logprobs: RowLogprobs | None
    finish_reason: FinishReason | None
    finite: bool = True  # False: the model produced NaN or infinity; there is no token
