"""An engine in this process and a client of a server give the same answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import aengine
from aengine import Client, Engine, InvalidRequestError, SamplingParams, Structured
from tests.http.demo_server import demo_server
from tests.rounding import near

pytestmark = pytest.mark.anyio

FRANCE = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

SEE = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": b"a file"}]}]

Model = Engine | Client


async def a_text(model: Model) -> Any:
    return await model.complete(FRANCE, max_tokens=20, temperature=0)


async def token_ids(model: Model) -> Any:
    return await model.complete((200, 201, 202), max_tokens=8, temperature=0)


async def as_long_as_the_model_likes(model: Model) -> Any:
    done = await model.complete([200] * 1850, temperature=0, ignore_eos=True, stop=["zzz"])
    assert len(done.token_ids) > 128  # the default of /generate
    return done


async def cut_short(model: Model) -> Any:
    return await model.complete(FRANCE, max_tokens=20, temperature=0, stop=" country", include_stop=True)


async def choices_with_logprobs(model: Model) -> Any:
    done = await model.complete(FRANCE, max_tokens=6, temperature=1, seed=7, n=3, logprobs=2)
    assert len(done.choices) == 3
    assert done.logprobs is not None
    return done


async def all_parameters_at_once(model: Model) -> Any:
    params = SamplingParams(
        max_tokens=12,
        min_tokens=3,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={200: -5.0},
        seed=3,
        stop=("zzz",),
        stop_token_ids=(999,),
        skip_special_tokens=False,
        allowed_token_ids=tuple(range(100, 1500)),
    )
    return await model.complete(FRANCE, params)


async def prompt_logprobs(model: Model) -> Any:
    texts = [await model.complete(FRANCE, max_tokens=2, temperature=0, prompt_logprobs=top, n=2) for top in (0, 1, 20)]
    assert [len((done.choices[1].prompt_logprobs or ())[0].top_ids) for done in texts] == [0, 1, 20]
    single = await model.complete([200], max_tokens=1, temperature=0, prompt_logprobs=2)
    assert single.choices[0].prompt_logprobs == []
    return [comparable(done) for done in (*texts, single)]


async def a_chat(model: Model) -> Any:
    done = await model.chat(QUESTION, temperature=0)
    assert "42" in done.text
    return done


async def a_chat_with_thoughts(model: Model) -> Any:
    done = await model.chat(QUESTION, temperature=0, template_kwargs={"enable_thinking": True})
    assert done.reasoning
    assert "<think>" not in done.text
    return done


async def a_chat_with_tools(model: Model) -> Any:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    done = await model.chat(asked, temperature=0, tools=[TOOL], skip_special_tokens=False)
    assert [call.name for call in done.tool_calls] == ["get_weather"]
    return done


async def a_chat_that_goes_on(model: Model) -> Any:
    begun = [*QUESTION, {"role": "assistant", "content": "17 + 25 ="}]
    done = await model.chat(begun, temperature=0, continue_final_message=True)
    assert done.text.startswith(" 42")
    return done


async def structured(model: Model) -> Any:
    form = Structured(regex="(yes|no)")
    assert (await model.complete("Is Paris in France?", structured=form)).text in ("yes", "no")
    form = Structured(regex="(yes|no)", thought="open")
    thought = await model.complete("Is Paris in France?", structured=form, max_tokens=40, seed=1)
    assert "</think>" in thought.text or len(thought.text) > 3
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    done = await model.complete("{", structured={"json": schema}, temperature=0, max_tokens=24)
    return comparable(thought), comparable(done)


async def fragments(model: Model) -> Any:
    return [fragment async for fragment in model.generate(FRANCE, max_tokens=9, temperature=0)]


async def a_submitted_stream(model: Model) -> Any:
    stream = await model.submit_chat(QUESTION, temperature=0, request_id="mine")
    found = []
    while taken := await stream.take():
        found += taken
    return stream.id, "".join(fragment.text for fragment in found), found[-1].usage is not None


async def embeddings(model: Model) -> Any:
    found = [
        await model.embed(FRANCE),
        await model.embed([FRANCE, [200, 201], "a"], normalize=False, priority=1, cache_salt="mine"),
        await model.embed([200, 201], request_id="mine"),
    ]
    return [([vector.tolist() for vector in one.vectors], one.usage.prompt_tokens) for one in found]


async def scores(model: Model) -> Any:
    found = await model.score(FRANCE, ["Paris", "Berlin"]), await model.score([FRANCE, "a"], ["Paris", "a"])
    ranking = await model.rerank(FRANCE, ["Berlin", "Paris", "one two"], top_n=2)
    assert len(ranking.results) == 2
    return [one.values for one in found], ranking.results, ranking.usage.prompt_tokens


WORK = (
    embeddings,
    scores,
    a_text,
    token_ids,
    as_long_as_the_model_likes,
    cut_short,
    choices_with_logprobs,
    all_parameters_at_once,
    prompt_logprobs,
    a_chat,
    a_chat_with_thoughts,
    a_chat_with_tools,
    a_chat_that_goes_on,
    structured,
    a_submitted_stream,
)


@pytest.fixture
async def both() -> AsyncIterator[tuple[Engine, Client]]:
    with demo_server() as url:
        async with (
            Engine(device="cpu", max_num_seqs=8, kv_cache_gib=0.1, progress=False) as engine,
            Client(url) as client,
        ):
            yield engine, client


def comparable(result: Any) -> Any:
    """Without ids, which are random."""
    if not isinstance(result, aengine.Completion):
        return result
    choices = [
        replace(choice, tool_calls=[replace(call, id="") for call in choice.tool_calls]) for choice in result.choices
    ]
    return choices, result.usage


@pytest.mark.slow
async def test_the_same_results(both: tuple[Engine, Client]) -> None:
    engine, client = both
    for work in WORK:
        over_http = msgspec.to_builtins(comparable(await work(client)))
        assert over_http == near(comparable(await work(engine))), work.__name__


async def test_the_same_fragments_put_together(both: tuple[Engine, Client]) -> None:
    """A slow server sends several tokens at once; nothing else may differ."""
    told, streamed = [await fragments(model) for model in both]
    for field in ("text", "token_ids"):
        empty: Any = getattr(told[0], field)[:0]
        assert sum_of(streamed, field, empty) == sum_of(told, field, empty)
    assert streamed[-1].finish_reason == told[-1].finish_reason
    assert streamed[-1].usage == told[-1].usage


def sum_of(pieces: list[aengine.Fragment], field: str, empty: Any) -> Any:
    for piece in pieces:
        empty += getattr(piece, field)
    return empty


REFUSED: dict[str, Callable[[Model], Awaitable[Any]]] = {
    "a value out of range": lambda model: model.complete(FRANCE, temperature=9),
    "a parameter that is none": lambda model: model.complete(FRANCE, max_token=9),
    "both spellings": lambda model: model.complete(FRANCE, SamplingParams(), max_tokens=9),
    "a token that is none": lambda model: model.complete([10**9]),
    "not a prompt": lambda model: model.complete(b"bytes"),  # type: ignore[arg-type]
    "an empty prompt": lambda model: model.complete([]),
    "more than the context": lambda model: model.complete(FRANCE, max_tokens=10**6),
    "a bad regex": lambda model: model.complete(FRANCE, structured=Structured(regex="(")),
    "a form by another name": lambda model: model.complete(FRANCE, structured=Structured(regex="(", origin="mine")),
    "a thought that is none": lambda model: model.complete(FRANCE, structured={"regex": "a", "thought": "maybe"}),
    "half a priority": lambda model: model.complete(FRANCE, priority=0.5),
    "a priority that is true": lambda model: model.complete(FRANCE, priority=True),
    "a priority of 65 bits": lambda model: model.complete(FRANCE, priority=2**63),
    "a salt that is no text": lambda model: model.complete(FRANCE, cache_salt=7),
    "two forms": lambda model: model.complete(FRANCE, structured=Structured(regex="a", grammar="b")),
    "ids that are more than the context": lambda model: model.complete([5] * 10**4),
    "a chat that is more than the context": lambda model: model.chat([{"role": "user", "content": "hi " * 9999}]),
    "an image for a model without eyes": lambda model: model.chat(SEE),
    "an image by its URL": lambda model: model.chat([{"role": "user", "content": [{"type": "image_url"}]}]),
    "no messages": lambda model: model.chat("hi"),  # type: ignore[arg-type]
    "nothing to embed": lambda model: model.embed([]),
    "an empty text to embed": lambda model: model.embed(["a", ""]),
    "bytes to embed": lambda model: model.embed(b"a"),  # type: ignore[arg-type]
    "a token to embed that is none": lambda model: model.embed([10**9]),
    "more to embed than the context": lambda model: model.embed(["a", "hi " * 9999]),
    "more texts than a request has": lambda model: model.embed(["a"] * 2049),
    "dimensions that the model does not have": lambda model: model.embed("a", dimensions=8),
    "no dimensions": lambda model: model.embed("a", dimensions=0),
    "an option of embeddings that is none": lambda model: model.embed("a", temperature=0),
    "half a priority of embeddings": lambda model: model.embed("a", priority=0.5),
    "classes of a model without": lambda model: model.classify("a"),
    "two queries for three documents": lambda model: model.score(["a", "b"], ["a", "b", "c"]),
    "no documents": lambda model: model.rerank("a", []),
    "an instruction that nobody reads": lambda model: model.score("a", "b", instruction="c"),
    "no place in a ranking": lambda model: model.rerank("a", ["b"], top_n=0),
    "a stop id beyond the vocabulary": lambda model: model.complete(FRANCE, stop_token_ids=[10**9]),
}


REFUSED_BY_SHAPE: dict[str, Callable[[Model], Awaitable[Any]]] = {  # the server's JSON parser words the error
    "ids that are no integers": lambda model: model.complete([1.5]),  # type: ignore[list-item]
    "ids that are text": lambda model: model.complete(["a"]),  # type: ignore[list-item]
}


async def test_the_same_refusals(both: tuple[Engine, Client]) -> None:
    for what, work in (REFUSED | REFUSED_BY_SHAPE).items():
        told = []
        for model in both:
            with pytest.raises(InvalidRequestError) as caught:
                await work(model)
            words = str(caught.value) if what in REFUSED else caught.value.param in str(caught.value)
            told.append((type(caught.value), caught.value.param, words))
        assert told[0] == told[1], what
