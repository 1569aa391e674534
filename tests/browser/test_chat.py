"""The chat: streamed answers, stopping them, the request's parameters, and stored settings."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.responses import Response

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.errors import EngineFailedError, QueueFullError
from aengine.text.answer.parser import AnswerFormat
from aengine.types import Fragment, Usage
from tests.browser.chromium import Tab
from tests.browser.talking import ENDED, Instead, answer, ask, demo_page, finish, kept, talking_to
from tests.http.fake_engine import FakeEngine, adapter_info
from tests.http.serving import hosting

pytestmark = pytest.mark.anyio


async def test_a_question_to_the_demo_model(tab: Tab) -> None:
    async with demo_page(tab):
        await ask(tab, "What is the capital of France?")
        await tab.until(ENDED)
        assert "Paris" in await tab.text(".prose")
        assert " prompt tokens cached" in await tab.text(".foot")
        await tab.until("Number(document.querySelector('#pages-cached').textContent) > 0")


async def test_an_answer_is_shown_while_it_comes(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        await tab.until("!document.querySelector('.dot').hidden")
        for text in ("Hel", "lo"):
            stream.put(Fragment(text, (1,)))
            await tab.until(f"document.querySelector('.prose').textContent.endsWith({text!r})")
            assert await tab.evaluate("document.querySelector('.turn:last-child').ariaBusy") == "true"
        finish(stream, "!")
        await tab.until(ENDED)
        assert await tab.text(".prose") == "Hello!"
        assert "4 tokens" in await tab.text(".foot")
        assert "3 of 9 prompt tokens cached" in await tab.text(".foot")


@pytest.mark.parametrize("way", ["button", "escape", "new chat"])
async def test_stopping_aborts_the_request(tab: Tab, way: str) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment("Hel", (1,)))
        await tab.until("document.querySelector('.prose').textContent")
        if way == "escape":
            await tab.press("Escape")
        else:
            await tab.click("#stop" if way == "button" else "#new-chat")
        async with asyncio.timeout(10):
            await stream.aborted.wait()
        if way == "new chat":
            assert await tab.evaluate("document.querySelectorAll('.turn').length") == 0
        else:
            await tab.until(ENDED)
            assert await tab.text(".prose") == "Hel"
            assert "stopped" in await tab.text(".foot")
        await answer(tab, engine, "now", "again?")
        assert await tab.text(".turn:last-child .prose") == "now"


async def test_the_whole_chat_is_sent_and_survives_a_reload(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await tab.click("[name=system]")
        await tab.write("Be brief.")
        await answer(tab, engine, "first answer", "first")
        await kept(tab)
        await tab.open(url)
        assert await tab.text(".prose") == "first answer"
        await answer(tab, engine, "second answer", "second")
        assert [(one["role"], one["content"]) for one in engine.chats[-1].messages] == [
            ("system", "Be brief."),
            ("user", "first"),
            ("assistant", "first answer"),
            ("user", "second"),
        ]
        await tab.click("#new-chat")
        await answer(tab, engine, "third answer", "third")
        assert [one["content"] for one in engine.chats[-1].messages] == ["Be brief.", "third"]


FIELDS = {
    "temperature": "1.25",
    "top_p": "0.5",
    "top_k": "7",
    "min_p": "0.25",
    "max_tokens": "12",
    "min_tokens": "2",
    "seed": "3",
    "presence_penalty": "0.5",
    "frequency_penalty": "-0.5",
    "repetition_penalty": "1.5",
    "stop": "END\nSTOP",
    "bad_words": "evil",
    "logit_bias": '{"5": -1}',
    "more": '{"stop_token_ids": [7], "cache_salt": "mine"}',
}


async def test_the_sampling_fields_are_sent_and_an_empty_one_is_not(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await answer(tab, engine, "a")
        assert engine.submitted[-1].params.temperature == engine.default_params.temperature
        await tab.click("#settings summary")
        for name, value in FIELDS.items():
            await tab.click(f"[name={name}]")
            await tab.write(value)
        await tab.click("[name=ignore_eos]")
        await tab.evaluate("document.querySelector('[name=thinking]').value = 'off'")
        await answer(tab, engine, "b")
        params = engine.submitted[-1].params
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            assert getattr(params, name) == float(FIELDS[name]), name
        for name in ("top_k", "max_tokens", "min_tokens", "seed"):
            assert getattr(params, name) == int(FIELDS[name]), name
        assert (params.stop, params.bad_words, params.logit_bias) == (("END", "STOP"), ("evil",), {5: -1.0})
        assert (params.ignore_eos, params.stop_token_ids) == (True, (7,))
        assert engine.chats[-1].template_kwargs == {"enable_thinking": False}
        await tab.open(url)
        await answer(tab, engine, "c")  # kept
        assert engine.submitted[-1].params == params
        await tab.click("#reset")
        await answer(tab, engine, "d")
        assert engine.submitted[-1].params == engine.submitted[0].params


async def test_an_answer_can_be_held_to_a_schema(tab: Tab) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await tab.evaluate(
            "(select => { select.value = 'json_schema'; select.dispatchEvent(new Event('input', { bubbles: true })); })"
            "(document.querySelector('[name=format]'))"
        )
        await tab.click("[name=schema]")
        await tab.write('{"type": ')
        await ask(tab, "hi")
        await tab.until("document.activeElement.name === 'schema'")
        assert engine.submitted == []
        await tab.evaluate("document.querySelector('[name=schema]').value = ''")
        await tab.write(json.dumps(schema))
        await tab.click("#send")
        finish(await engine.next_stream(), "{}")
        await tab.until(ENDED)
        assert engine.submitted[-1].params.structured.json == schema


async def test_a_model_or_an_adapter_can_be_chosen(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    engine.adapters = [adapter_info("sql", "/adapters/sql")]
    async with talking_to(engine, tab) as url:
        options = "[...document.querySelector('#model-select').options].map((one) => one.text)"
        assert await tab.evaluate(options) == ["fake", "sql (adapter)"]
        await tab.evaluate("document.querySelector('#model-select').focus()")
        await tab.press("ArrowDown")
        await tab.until("document.querySelector('#model-name').textContent === 'sql'")
        await answer(tab, engine, "a")
        assert engine.submitted[-1].options["adapter"] == "sql"
        await kept(tab)
        await tab.open(url)
        await tab.until("document.querySelector('#model-name').textContent === 'sql'")


async def test_the_meter_shows_how_full_the_context_is(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        assert await tab.evaluate("document.querySelector('#meter').hidden")
        await answer(tab, engine, "a")
        assert await tab.text("#meter-text") == "13 of 64 tokens"
        assert await tab.evaluate("document.querySelector('#meter-bar').value") == 13
        await tab.click("#new-chat")
        assert await tab.evaluate("document.querySelector('#meter').hidden")


async def test_an_answer_that_was_cut_goes_on(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "count")
        (await engine.next_stream()).put(Fragment("1 2 ", (1,), None, "length", usage=Usage(1, 1, 0)))
        await tab.until(ENDED)
        assert "cut off" in await tab.text(".foot")
        assert "1 token ·" in await tab.text(".foot")
        await tab.click(".go-on")
        finish(await engine.next_stream(), "3 4")
        await tab.until("document.querySelector('.prose').textContent === '1 2 3 4' && " + ENDED)
        chat = engine.chats[-1]
        assert chat.continue_final_message
        assert [(one["role"], one["content"]) for one in chat.messages] == [("user", "count"), ("assistant", "1 2 ")]
        assert await tab.evaluate("document.querySelector('.go-on').hidden")


async def test_every_turn_can_be_edited_and_branches_stay(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    contents = "[...document.querySelectorAll('.turn')].map((one) => one.querySelector('.asked, .prose').textContent)"
    async with talking_to(engine, tab) as url:
        await answer(tab, engine, "A1", "Q1")
        await answer(tab, engine, "A2", "Q2")
        await tab.click(".turn:nth-child(1) .edit")
        await tab.until("document.activeElement.value === 'Q1'")
        await tab.evaluate("document.activeElement.value = ''")
        await tab.write("Q1 anew")
        await tab.click(".editor .primary")
        finish(await engine.next_stream(), "B1")
        await tab.until(ENDED)
        assert await tab.evaluate(contents) == ["Q1 anew", "B1"]
        assert [one["content"] for one in engine.chats[-1].messages] == ["Q1 anew"]
        await tab.click(".again")
        finish(await engine.next_stream(), "B2")
        await tab.until(ENDED)
        assert await tab.text(".turn:nth-child(2) .branches") == "‹2/2›"
        await tab.click(".turn:nth-child(2) .branches button")
        await tab.until(f"{contents}.at(-1) === 'B1'")
        assert await tab.evaluate("document.activeElement.ariaLabel") == "Next branch"
        await tab.click(".turn:nth-child(1) .branches button")
        await tab.until(f"{contents}.at(-1) === 'A2'")
        assert await tab.evaluate(contents) == ["Q1", "A1", "Q2", "A2"]
        await tab.click(".turn:nth-child(2) .edit")
        await tab.evaluate("document.activeElement.value = ''")
        await tab.write("A1 by hand")
        await tab.click(".editor .primary")
        await tab.until(f"{contents}.at(-1) === 'A1 by hand'")
        await answer(tab, engine, "C2", "Q3")
        assert [one["content"] for one in engine.chats[-1].messages] == ["Q1", "A1 by hand", "Q3"]
        await kept(tab)
        await tab.open(url)
        await tab.text(".turn:nth-child(4)")
        assert await tab.evaluate(contents) == ["Q1", "A1 by hand", "Q3", "C2"]


async def test_a_setting_out_of_its_range_is_pointed_at_and_nothing_is_sent(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await answer(tab, engine, "first")
        await tab.click("[name=temperature]")
        await tab.write("9")
        await ask(tab, "hi")
        await tab.until("document.activeElement.name === 'temperature'")
        assert await tab.evaluate("document.querySelector('#question').value") == "hi"
        await tab.click(".again")
        await tab.until("document.activeElement.name === 'temperature'")
        assert len(engine.submitted) == 1


async def test_shift_enter_breaks_the_line(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await tab.click("#question")
        await tab.write("one")
        await tab.press("Enter", shift=True)
        await tab.write("two")
        await tab.press("Enter")
        finish(await engine.next_stream(), "fine")
        await tab.until(ENDED)
        assert engine.chats[-1].messages[-1]["content"] == "one\ntwo"
        assert await tab.text(".asked") == "one\ntwo"


async def test_a_refusal_is_shown_with_a_remedy_and_can_be_tried_again(tab: Tab) -> None:
    engine = FakeEngine(held=True, refuse=QueueFullError("5 requests wait already", retry_after=2))
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        await tab.until(ENDED)
        assert "5 requests wait already" in await tab.text(".failure")
        assert "Try again in 2 s" in await tab.text(".failure")
        engine.refuse = None
        await tab.click(".again")
        finish(await engine.next_stream(), "here")
        await tab.until(ENDED)
        assert await tab.text(".prose") == "here"
        assert await tab.evaluate("document.querySelector('.failure').hidden")
        assert [one["content"] for one in engine.chats[-1].messages] == ["hi"]
        engine.refuse = QueueFullError("5 requests wait already", retry_after=2)
        await ask(tab, "lost")
        await tab.until("document.querySelectorAll('.turn').length === 4 && " + ENDED)
        engine.refuse = None
        await ask(tab, "next")
        await engine.next_stream()
        assert [one["content"] for one in engine.chats[-1].messages] == ["hi", "here", "next"]
    assert [complaint for complaint in tab.complaints if "503" not in complaint] == []
    tab.complaints.clear()


async def test_a_stream_that_fails_keeps_what_had_come(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment("So far", (1,)))
        await tab.until("document.querySelector('.prose').textContent")
        stream.fail(EngineFailedError("the device is gone"))
        await tab.until(ENDED)
        assert await tab.text(".prose") == "So far"
        assert "the device is gone" in await tab.text(".failure")
        assert "log has the details" in await tab.text(".failure")


async def test_thoughts_are_folded(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    engine.answer_format = AnswerFormat(thoughts=True)
    async with talking_to(engine, tab):
        await answer(tab, engine, "<think>Hm <b>.</think>Yes.")
        assert await tab.text(".thought p") == "Hm <b>."
        assert await tab.text(".prose") == "Yes."
        assert not await tab.evaluate("document.querySelector('.thought').open")
        await tab.click(".thought summary")
        assert await tab.evaluate("document.querySelector('.thought').open")


async def test_calls_of_tools_are_shown_as_code(tab: Tab) -> None:
    pieces = [
        {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": ' "<i>Paris"}'}},
    ]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    engine = FakeEngine()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    scripted = Instead(app, "/v1/chat/completions", Response(body, media_type="text/event-stream"))
    async with hosting(scripted) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await ask(tab, "weather?")
        await tab.until(ENDED)
        assert "get_weather" in await tab.text(".code")
        assert json.loads(await tab.text(".code code")) == {"city": "<i>Paris"}


async def test_a_connection_that_breaks_off_is_told(tab: Tab) -> None:
    engine = FakeEngine()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    broken = Instead(app, "/v1/chat/completions", Response("data: {}\n\n", media_type="text/event-stream"))
    async with hosting(broken) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await ask(tab, "hi")
        await tab.until(ENDED)
        assert "broke off" in await tab.text(".failure")
