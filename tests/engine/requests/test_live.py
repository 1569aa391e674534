"""A choice turns the updates of one step into one fragment. Its histograms count every token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aengine.engine.requests.live import LiveRequest
from aengine.errors import NonFiniteLogitsError
from aengine.latency import Histogram, Latencies
from aengine.model.loading.hub import resolve_model
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.scheduling.sequence import Update
from aengine.step_plan import RowLogprobs
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.types import FinishReason, Fragment

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(resolve_model(None, None)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time in seconds that requests read."""
    now = [1.0]
    monkeypatch.setattr("aengine.engine.requests.live.monotonic", lambda: now[0])

    def set_to(seconds: float) -> None:
        now[0] = seconds

    return set_to


def request(tokenizer: Tokenizer, **params: Any) -> LiveRequest:
    sequence = TokenSequence(
        prompt=array("i", [1, 2]),
        params=SamplingParams(**params),
        seed=0,
        stop_ids=(),
        max_total=100,
        rank=(0.0, 0),
    )
    live = LiveRequest("one", sequence, None, tokenizer, lambda _: None, lambda _: None, Latencies())
    live.begin()
    return live


def step(live: LiveRequest, token_ids: Sequence[int], reason: FinishReason | None = None) -> int:
    """Deliver the tokens of one step. reason: why the sequence ends after them."""
    (choice,) = live.choices
    return choice.deliver(Update(choice.sequence, tuple(token_ids), None, reason))


def counted(histogram: Histogram) -> dict[float, int]:
    """Return how many values each bound has, without bounds that have none."""
    return {bound: count for bound, count in zip(histogram.bounds, histogram.counts, strict=False) if count}


async def test_the_tokens_of_a_step_come_as_one_fragment(tokenizer: Tokenizer) -> None:
    live = request(tokenizer, logprobs=0)
    words = tokenizer.encode_now(" one two three four")
    sequence = live.choices[0].sequence
    logprobs = [RowLogprobs(-float(at), [], []) for at, _ in enumerate(words)]
    live.choices[0].deliver(Update(sequence, tuple(words), logprobs, None))
    (fragment,) = await live.stream.take()
    assert fragment.text == " one two three four"
    assert fragment.token_ids == tuple(words)
    assert fragment.logprobs is not None
    assert [(one.token_id, one.logprob) for one in fragment.logprobs] == [
        (word, -float(at)) for at, word in enumerate(words)
    ]


async def last_fragment(live: LiveRequest) -> Fragment:
    return (await live.stream.take())[-1]


@pytest.mark.parametrize("known", [None, "length", "stop"])
async def test_a_stop_string_drops_the_later_tokens_of_its_step(tokenizer: Tokenizer, known: FinishReason) -> None:
    """known: why a later token of the same step ended the sequence in the scheduler."""
    live = request(tokenizer, stop=("two",))
    words = tokenizer.encode_now(" one two three four")
    one_two = tokenizer.encode_now(" one two")
    ends_after = step(live, words, known)
    fragment = await last_fragment(live)
    assert ends_after == len(one_two)
    assert fragment.text == " one "
    assert fragment.token_ids == tuple(one_two)
    assert (fragment.finish_reason, fragment.stop_string) == ("stop", "two")
    assert fragment.usage is not None
    assert fragment.usage.completion_tokens == len(one_two)


async def test_a_failed_step_says_after_how_many_tokens(tokenizer: Tokenizer) -> None:
    live = request(tokenizer)
    words = tokenizer.encode_now(" one two")
    step(live, words)
    (choice,) = live.choices
    with pytest.raises(NonFiniteLogitsError, match=f"after {len(words)} output tokens"):
        choice.deliver(Update(choice.sequence, (), None, "error", finite=False))
    fragment = await last_fragment(live)
    assert (fragment.text, fragment.token_ids, fragment.finish_reason) == (" one two", tuple(words), None)


async def test_tokens_that_come_together_share_their_gap(tokenizer: Tokenizer, clock: Callable[[float], None]) -> None:
    live = request(tokenizer)
    seen = live.latencies
    clock(2.0)
    step(live, [300])
    clock(3.0)
    step(live, [301, 302, 303, 304])
    clock(3.5)
    step(live, [305])
    clock(4.0)
    step(live, [306, 307], "length")
    assert counted(seen.first_token) == {1.0: 1}
    assert counted(seen.inter_token) == {0.3: 6, 0.5: 1}  # four gaps of 1 / 4, one of 0.5, and two of 0.5 / 2
    assert seen.inter_token.total == 2.0
    assert counted(seen.decode) == {2.0: 1}
    assert seen.mean_inter_token.total == pytest.approx(2 / 7)
    assert counted(seen.generated_tokens) == {10.0: 1}
    assert seen.generated_tokens.total == 8


async def test_tokens_that_come_with_the_first_one_have_no_gap(
    tokenizer: Tokenizer, clock: Callable[[float], None]
) -> None:
    live = request(tokenizer)
    clock(1.5)
    step(live, [300, 301, 302])
    assert live.latencies.first_token.total == pytest.approx(0.5)
    assert sum(live.latencies.inter_token.counts) == 2
    assert live.latencies.inter_token.total == 0


async def test_tokens_after_a_stop_string_are_in_no_histogram(
    tokenizer: Tokenizer, clock: Callable[[float], None]
) -> None:
    live = request(tokenizer, stop=("two",))
    kept = len(tokenizer.encode_now(" one two"))
    step(live, tokenizer.encode_now(" one"))
    clock(1.4)
    step(live, tokenizer.encode_now(" one two three four")[1:])
    assert live.latencies.generated_tokens.total == kept
    assert sum(live.latencies.inter_token.counts) == kept - 1
    assert live.latencies.inter_token.total == pytest.approx(0.4)
