"""The results of requests, such as fragments, completions and embeddings, and `Stats`, a snapshot of the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

# What happens to running requests when the engine is put to sleep.
SleepMode = Literal["wait", "abort"]


# gc=False: an answer may hold a million of these, and they are never part of a cycle.
class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate at one position. `token` is the id's own text; `logprob` is a natural logarithm."""

    token_id: int
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The logprobs of the sampled token and of the likeliest candidates, under the raw distribution."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True):
    """The logprob of a token of the prompt after the tokens before it, and the likeliest candidates there."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top_ids: Sequence[int]
    top: Sequence[float]  # the candidates' logprobs


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool. `arguments` is a JSON object, or the beginning of one if the answer was cut off there."""

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. The first piece of a call has `id` and `name`."""

    index: int  # of the call in the answer
    arguments: str
    id: str | None = None
    name: str | None = None


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join the pieces of calls into whole calls."""
    heads: list[tuple[str, str]] = []  # id and name
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            heads.append((delta.id, delta.name))
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    return tuple(ToolCall(*head, "".join(pieces)) for head, pieces in zip(heads, arguments, strict=True))


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request. `completion_tokens` sums over all n choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Fragment(msgspec.Struct, frozen=True):
    """A piece of one choice's output.

    `text` may be empty while bytes of a character or a possible stop string are held back. Every token of the output is
    in the `token_ids` of exactly one fragment. Tokens that come from one step are in one fragment. The last fragment of
    a choice has a `finish_reason`. The last fragment of the request also has `usage`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0  # of the choice
    # In a choice's first fragment, if requested: all tokens of the prompt except the first.
    prompt_logprobs: Sequence[PromptLogprob] | None = None
    stop_string: str | None = None  # in a choice's last fragment: the stop string that ended it
    # Parts of a chat's answer that are not in `text`:
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """One finished output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: Sequence[PromptLogprob] | None = None  # of all tokens of the prompt except the first
    stop_string: str | None = None  # the stop string that ended it
    reasoning: str = ""  # the thought of a chat's answer; not in `text`
    tool_calls: tuple[ToolCall, ...] = ()  # of a chat's answer; not in `text`


def is_cut(last: Fragment | Choice) -> bool:
    """Return whether the output was cut off: the model did not end it itself."""
    return last.finish_reason != "stop" or last.stop_string is not None


class Completion(msgspec.Struct, frozen=True):
    """A finished request. The properties read the first choice; `choices` has all n."""

    id: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that requests may name, and its present use."""

    name: str
    path: str  # as it was given: a folder or a Hugging Face id
    rank: int
    bytes: int  # of host memory
    created: int  # unix seconds when it was loaded
    on_device: bool
    running: int  # sequences with a row
    waiting: int  # sequences in the queue


class Embeddings(msgspec.Struct, frozen=True):
    """A vector of float32 for each prompt. `numpy.asarray` reads it without a copy."""

    vectors: tuple[array[float], ...]
    usage: Usage


class Scores(msgspec.Struct, frozen=True):
    """How well texts match: a number for each pair, the higher the better."""

    values: tuple[float, ...]
    usage: Usage


class Ranked(msgspec.Struct, frozen=True):
    """A document's score, and its index in the request."""

    index: int
    score: float


class Ranking(msgspec.Struct, frozen=True):
    """Documents, the best first. Documents with equal scores keep the request's order."""

    results: tuple[Ranked, ...]
    usage: Usage


class Classified(msgspec.Struct, frozen=True):
    """The likeliest class of a prompt, and the probability of each class in the checkpoint's order."""

    label: str
    probabilities: tuple[float, ...]


class Classes(msgspec.Struct, frozen=True):
    """The classes of prompts, from a classification head."""

    results: tuple[Classified, ...]
    usage: Usage


class DeviceMemory(msgspec.Struct, frozen=True):
    """A GPU of the engine, and its memory in bytes, including the memory of other processes."""

    device: str  # as in the knob `device`
    name: str
    used: int
    total: int


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of the engine. Counters start at 0 with the engine. The pool's pages add up to `pages_total`."""

    running: int  # sequences with a row
    waiting: int  # sequences without a row, including those that will fork from another
    pages_total: int  # without the reserved page 0
    pages_used: int  # held by running sequences, shared with the cache or not
    pages_cached: int  # in the prefix cache and evictable now
    pages_free: int
    page_size: int
    steps: int
    requests: int  # all that have ended: finished, aborted or failed
    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    computed_tokens: int  # tokens that the model computed
    generated_tokens: int
    preemptions: int
    last_step_age: float | None  # seconds since the last step was committed; None before the first
    adapter_places: int = 0  # slots for adapters on the device
    adapter_loads: int = 0  # from host memory to a slot
    adapter_evictions: int = 0  # from a slot, to make room for another
    cached_host_tokens: int = 0  # part of `cached_tokens`: loaded from host memory
    cached_disk_tokens: int = 0  # part of `cached_tokens`: loaded from the disk
    host_pages_total: int = 0  # room in host memory; 0: this tier is off
    host_pages: int = 0  # stored in host memory
    host_page_bytes: int = 0  # per page, over all ranks
    host_stores: int = 0  # pages copied from the device to host memory
    host_loads: int = 0  # pages copied back
    host_misses: int = 0  # pages evicted from the device before they were copied
    disk_bytes: int = 0  # of files
    disk_stores: int = 0  # pages written to the disk
    disk_loads: int = 0  # pages read from it
    state_snapshots: int = 0  # room for snapshots of recurrent states
    state_snapshots_used: int = 0  # in the prefix cache, or being copied there
    state_snapshot_evictions: int = 0  # to make room for another
    window_pages: int = 0  # of layers with a sliding window, if they have their own pages
    window_pages_used: int = 0  # held by running sequences
    window_pages_cached: int = 0  # other pages that later cache hits can use
    speculation: str = "off"  # the proposer that drafts tokens: mtp, ngram, eagle3, dflash or draft
    drafted_tokens: int = 0  # drafts that steps verified
    accepted_tokens: int = 0  # drafts that equal the tokens drawn at their positions
    verified_rows: int = 0  # sequences with drafts, over all steps
    accepted_by_position: tuple[int, ...] = ()  # [i]: how many of `verified_rows` accepted their draft i

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that running sequences hold."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache; 0 before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a sequence gets from a step with drafts: the accepted ones and one more. 0 before the first."""
        return 1 + self.accepted_tokens / self.verified_rows if self.verified_rows else 0.0
