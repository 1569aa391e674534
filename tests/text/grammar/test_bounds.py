"""Bad and hostile grammars end in errors that name the field, in time, while the loop keeps turning."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

import anyio
import pytest

from aengine.errors import InvalidRequestError, QueueFullError
from aengine.model.loading.hub import resolve_model
from aengine.requests.structured import Structured
from aengine.text.grammar.grammars import Grammars
from aengine.text.grammar.source import GrammarLimits, grammar_source
from aengine.text.grammar.threads import MAX_THREADS, CompileThreads
from aengine.text.tokens.tokenizer import Tokenizer
from tests.one_in import one_in

pytestmark = pytest.mark.anyio

LIMITS = GrammarLimits()


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model(None, None))


@pytest.fixture
def grammars(demo: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(demo, demo.vocab_size, (4091,))
    yield grammars
    grammars.close()


def nested(levels: int) -> object:
    """Return a schema with that many nested objects and lists."""
    schema: object = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


BAD: dict[str, tuple[Structured, str]] = {
    "no such type": (Structured(json={"type": "foo"}), "Invalid type: foo"),
    "an unknown keyword is not skipped": (Structured(json={"type": "array", "contains": {"type": "null"}}), "contains"),
    "nor by the schema's own wish": (
        Structured(json={"type": "array", "contains": {"type": "null"}, "x-guidance": {"lenient": True}}),
        "contains",
    ),
    "nothing satisfies it": (Structured(json={"type": "integer", "minimum": 2, "maximum": 1}), "minimum"),
    "not JSON": (Structured(json="{"), "not JSON"),
    "not an object": (Structured(json="[1]"), "must be an object"),
    "not JSON's": (Structured(json={"const": {1, 2}}), "a set"),
    "not a number": (Structured(json={"const": float("nan")}), "nan"),
    "a key that is none": (Structured(json={1: 2}), "key"),  # type: ignore[dict-item]
    "a lone surrogate": (Structured(json={"const": "\ud800"}), "surrogate"),
    "a lone surrogate as a choice": (Structured(choice=("a", "\ud800")), ""),
    "an open group": (Structured(regex="(a"), "unclosed group"),
    "a lookahead": (Structured(regex="(?=a)b"), "look-around"),
    "no such rule": (Structured(grammar="start: foo"), "unknown name"),
    "options": (Structured(grammar='start: "a"\n  %llguidance {"no_forcing": false}'), "options"),
    "a broken schema within": (Structured(grammar="start: %json {"), "%json"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_compiled_is_refused_by_name_and_reason(grammars: Grammars, name: str) -> None:
    structured, words = BAD[name]
    with pytest.raises(InvalidRequestError) as caught:
        await grammars.matcher(structured)
    assert caught.value.param == structured.param
    assert str(caught.value).startswith(f"{structured.param}")
    assert words in str(caught.value)
    assert "no_forcing" not in str(caught.value)
    assert len(str(caught.value)) < 700


async def test_errors_name_the_field_of_the_request(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match=r"^response_format: ") as caught:
        await grammars.matcher(Structured(json={"type": "foo"}, origin="response_format"))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "structured",
    [
        Structured(json={"enum": ["x" * 140_000]}),
        Structured(json={"enum": [1] * 70_000}),
        Structured(json={"k" * 140_000: 1}),
        Structured(json=" " * 140_000),
        Structured(regex="a" * 140_000),
        Structured(choice=("a" * 70_000, "b" * 70_000)),
        Structured(grammar="// " + "x" * 140_000),
    ],
)
def test_sources_have_a_bound(structured: Structured) -> None:
    with pytest.raises(InvalidRequestError, match="131072"):
        grammar_source(structured, LIMITS)


def test_nesting_has_a_bound() -> None:
    grammar_source(Structured(json=nested(64)), LIMITS)  # type: ignore[arg-type]
    deep = nested(65)
    for structured in (
        Structured(json=deep),  # type: ignore[arg-type]
        Structured(json=json.dumps(deep)),
        Structured(grammar="start: %json " + json.dumps(deep)),
        Structured(json='{"a":' * 100_000 + "1" + "}" * 100_000),
        Structured(json='{"a":' * 10_000 + "1" + "}" * 10_000),
        Structured(grammar="start: %json " + "[" * 60_000 + "]" * 60_000),
    ):
        with pytest.raises(InvalidRequestError):
            grammar_source(structured, LIMITS)


@pytest.mark.parametrize(
    ("value", "good"), [(3, True), (0.01, True), (20_000, True), (20_001, False), (1.00001, False)]
)
def test_divisors_have_a_bound(value: float, good: bool) -> None:
    schema = {"type": "number", "multipleOf": value}
    for structured in (Structured(json=schema), Structured(grammar="start: %json " + json.dumps(schema))):
        if good:
            grammar_source(structured, LIMITS)
        else:
            with pytest.raises(InvalidRequestError, match="multipleOf"):
                grammar_source(structured, LIMITS)


def test_intersections_have_a_bound() -> None:
    """In strings and regexes they are text."""
    rules = "start: A\nA: " + " & ".join(["/a.*/"] * 9)
    grammar_source(Structured(grammar=rules + ' "&&" /&&\\/&/'), LIMITS)
    with pytest.raises(InvalidRequestError, match="intersections"):
        grammar_source(Structured(grammar=rules + " & /b/"), LIMITS)


async def test_what_takes_too_long_is_refused(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size, (4091,), GrammarLimits(seconds=0.0001))
    with pytest.raises(InvalidRequestError, match=r"structured.regex: compiling it takes longer than 0.0001 seconds"):
        await grammars.matcher(Structured(regex=r"\w{1000}\w{1000}"))
    grammars.close()


def chain(count: int, rule: Callable[[int], object]) -> dict[str, object]:
    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": rule(i) for i in range(count)} | {f"d{count}": {"type": "null"}}}


BOMBS = {
    "repetitions of repetitions": Structured(regex="((((a{0,1000}){0,1000}){0,1000}){0,1000})"),
    "exponential subsets": Structured(regex="(a|b)*a(a|b){1,90}c(.*a.{0,2000}b)"),
    "parentheses": Structured(regex="(" * 40_000 + "a" + ")" * 40_000),
    "Unicode classes": Structured(regex=r"[\w\d\p{L}]{1,500}" * 500),
    "rules that double": Structured(
        grammar="start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'
    ),
    "intersections": Structured(
        grammar="start: R0\n" + "\n".join(f"R{i}: R{i + 1} & /a*.{{{i}}}/" for i in range(300)) + "\nR300: /.*/"
    ),
    "a chain of rules": Structured(
        grammar="start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(9000)) + '\nr9000: "a"'
    ),
    "a chain of references": Structured(json=chain(3000, lambda i: {"$ref": f"#/$defs/d{i + 1}"})),
    "a chain of objects": Structured(json=chain(2000, lambda i: {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}})),
    "combinations of alternatives": Structured(
        json={"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(6)]} for i in range(40)]}
    ),
    "many properties": Structured(json={"properties": {f"p{i}": {"type": "string"} for i in range(2500)}}),
}


@pytest.mark.parametrize("name", one_in(4, BOMBS))
async def test_bombs_neither_hold_the_loop_nor_outlive_the_time(demo: Tokenizer, name: str) -> None:
    """Some are harmless to the compiler, others are refused; within the limit of a second each has an answer."""
    tries: list[dict[str, float]] = []
    while len(tries) < 3 and not any(map(in_time, tries)):  # the machine may be busy
        tries.append(await seconds_of(demo, BOMBS[name]))
    assert any(map(in_time, tries)), tries


def in_time(seconds: dict[str, float]) -> bool:
    # On a busy machine the timeout comes late; on an idle one, the gap is 0.05.
    return seconds["took"] < 5 and seconds["work"] < 0.1 and seconds["gap"] < 0.8


async def seconds_of(demo: Tokenizer, bomb: Structured) -> dict[str, float]:
    """Return the time until the answer, and the longest times that the loop worked and stood still."""
    grammars = Grammars(demo, demo.vocab_size, (4091,), GrammarLimits(seconds=1.0))
    gap = work = 0.0

    async def tick() -> None:
        nonlocal gap, work
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            gap, work = max(gap, time.perf_counter() - wall), max(work, time.thread_time() - cpu)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        began = time.perf_counter()
        with contextlib.suppress(InvalidRequestError):
            await grammars.matcher(bomb)
        took = time.perf_counter() - began
        group.cancel_scope.cancel()
    grammars.close()
    return {"took": took, "work": work, "gap": gap}


# ---- threads that cannot be stopped -----------------------------------------------------------------------


async def test_a_deadline_ends_the_wait_and_the_place_is_taken_until_the_work_ends() -> None:
    threads, go = CompileThreads(), threading.Event()
    for _ in range(MAX_THREADS):
        with pytest.raises(TimeoutError):
            await threads.run(go.wait, 0.01)
    with pytest.raises(QueueFullError, match="too many grammars"):
        await threads.run(lambda: 1, 0.05)
    go.set()
    assert await threads.run(lambda: 2, 5) == 2


async def test_a_thread_that_does_not_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = CompileThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_THREADS):
            with pytest.raises(RuntimeError, match="new thread"):
                await threads.run(lambda: 1, 5)
    assert await threads.run(lambda: 2, 30) == 2


async def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await CompileThreads().run(lambda: 1 // 0, 5)


async def test_a_waiter_that_is_cancelled_leaves_nothing_behind() -> None:
    threads, go = CompileThreads(), threading.Event()
    with anyio.move_on_after(0.01):
        await threads.run(go.wait, 5)
    go.set()
    for _ in range(MAX_THREADS + 1):
        assert await threads.run(lambda: 3, 5) == 3


@pytest.mark.parametrize("before", ['"a"', '/"/', '"\\""', '"a" // "\n |', '<"> ', "'\"' "])
async def test_quotes_hide_no_schema_from_the_bounds(demo: Tokenizer, before: str) -> None:
    grammars = Grammars(demo, demo.vocab_size, (4091,))
    grammar = f'start: {before} %json {{"type": "integer", "multipleOf": 100000000}} "b"'
    with pytest.raises(InvalidRequestError, match="too many states"):
        await grammars.matcher(Structured(grammar=grammar))
    grammars.close()


async def test_a_text_may_speak_of_json(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size, (4091,))
    await grammars.matcher(Structured(grammar='start: "%json or so" %json {"description": "like %json, but"}'))
    with pytest.raises(InvalidRequestError, match="must be followed by a JSON schema"):
        await grammars.matcher(Structured(grammar="start: %json or so"))
    grammars.close()
