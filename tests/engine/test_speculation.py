"""An engine that speculates: its output is the same, and it says which proposer runs and what was accepted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aengine
from aengine.runtime.speculation import choose
from aengine.runtime.speculation.base import NO_PROPOSER
from aengine.scheduling.batch import Counters
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Update
from aengine.step_cost import FREE
from aengine.step_plan import StepPlan, StepResult
from aengine.types import Completion
from bench.overhead import null_runtime
from tests.engine.conftest import idle
from tests.engine.speculation.test_heads import VOCAB, with_tokenizer
from tests.model.checkpoints import write_checkpoint
from tests.rounding import near

pytestmark = pytest.mark.anyio

PROMPT = "one two three one two three one two"
PARAMS: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
async def drafting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aengine.Engine]:
    """An engine whose drafts are repetitions, as many as there may be, however long steps take.

    At the end, nothing runs and every page is accounted for.
    """
    monkeypatch.setattr(choose, "step_cost", lambda proposer, model, device: FREE)
    async with aengine.Engine(device="cpu", kv_cache_gib=0.1, progress=False, speculation="ngram") as engine:
        yield engine
        await idle(engine)


async def sizes(engine: aengine.Engine, **params: Any) -> list[int]:
    """Return how many tokens each fragment of an answer has."""
    return [len(fragment.token_ids) async for fragment in engine.generate(PROMPT, **PARAMS | params)]


async def test_accepted_drafts_come_in_one_fragment(drafting: aengine.Engine) -> None:
    found = await sizes(drafting)
    assert sum(found) == PARAMS["max_tokens"]
    assert max(found) > 3
    assert sum(drafting.latencies.inter_token.counts) == sum(found) - 1


async def test_a_request_may_switch_drafts_off(drafting: aengine.Engine) -> None:
    assert await sizes(drafting, speculation=False) == [1] * PARAMS["max_tokens"]
    plain = await drafting.complete(PROMPT, **PARAMS, speculation=False)
    assert content(plain) == near(content(await drafting.complete(PROMPT, **PARAMS)))


def content(completion: Completion) -> Any:
    """Return what a request's output has, besides cached tokens."""
    [choice] = completion.choices
    return msgspec.to_builtins(
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            choice.stop_string,
            choice.logprobs,
            completion.usage.total_tokens,
        )
    )


async def test_a_stop_string_ends_the_output_among_accepted_drafts(drafting: aengine.Engine) -> None:
    """The stop strings end at consecutive tokens, so most of them end in the middle of a step."""
    whole = await drafting.complete(PROMPT, **PARAMS)
    texts = [drafting.tokenizer.decode(whole.token_ids[:count]) for count in range(len(whole.token_ids))]
    ends = []
    for text in texts[20:28]:
        params = PARAMS | {"stop": [text[len(texts[12]) :]]}
        expected = await drafting.complete(PROMPT, **params, speculation=False)
        assert content(await drafting.complete(PROMPT, **params)) == near(content(expected))
        ends.append(len(expected.choices[0].token_ids))
    assert ends == list(range(ends[0], ends[0] + 8))


def test_a_verified_row_counts_its_drafts_by_position() -> None:
    counters = Counters()
    for drafted, accepted in ((3, 0), (1, 1), (3, 2), (2, 2)):
        counters.count_verified(drafted, accepted)
    assert (counters.drafted, counters.accepted, counters.verified) == (9, 5, 4)
    assert counters.accepted_by_position == [3, 2, 0]


class Drafting(Scheduler):
    """Counts three drafts in each step, of which two are accepted."""

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        self.counters.count_verified(3, 2)
        return super().commit(plan, result)


async def test_stats_say_which_proposer_runs_and_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*given: Any) -> Any:
        return replace(null_runtime(*given), speculation=replace(NO_PROPOSER, name="ngram"))

    monkeypatch.setattr("aengine.engine.loaded.Scheduler", Drafting)
    async with aengine.Engine(start=start, progress=False) as engine:
        stats = engine.stats()
        assert (stats.speculation, stats.verified_rows, stats.mean_accepted_length) == ("ngram", 0, 0.0)
        await engine.complete([300], max_tokens=5, temperature=0, ignore_eos=True)
        stats = engine.stats()
        steps = stats.steps
        assert (stats.drafted_tokens, stats.accepted_tokens, stats.verified_rows) == (3 * steps, 2 * steps, steps)
        assert stats.accepted_by_position == (steps, steps, 0)
        assert stats.mean_accepted_length == 3.0


async def test_without_a_proposer_speculation_is_off() -> None:
    async with aengine.Engine(start=null_runtime, progress=False) as engine:
        await engine.complete([300], max_tokens=5, temperature=0, ignore_eos=True)
        stats = engine.stats()
    assert (stats.speculation, stats.drafted_tokens, stats.verified_rows) == ("off", 0, 0)


@pytest.mark.parametrize(
    ("knob", "line"),
    [
        ("auto", "mtp, up to 3 drafts a step for each sequence (the checkpoint has an MTP layer)"),
        ("ngram", "ngram, up to 4 drafts a step for each sequence (the knob speculation asks for it)"),
        ("off", "off (the knob speculation asks for it)"),
    ],
)
async def test_one_line_of_the_log_says_which_proposer_runs(
    knob: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="aengine"):
        async with aengine.Engine(device="cpu", kv_cache_gib=0.05, progress=False, speculation=knob):
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert [one for one in lines if one.startswith("speculation:")] == [f"speculation: {line}"]


async def test_a_checkpoint_without_a_layer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint("qwen3", tmp_path, vocab_size=VOCAB)
    with_tokenizer(tmp_path)
    with caplog.at_level(logging.INFO, logger="aengine"):
        async with aengine.Engine(str(tmp_path), device="cpu", kv_cache_gib=0.05, progress=False):
            pass
    assert "speculation: off (the checkpoint has no MTP layer)" in caplog.messages
