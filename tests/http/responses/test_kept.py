"""Kept responses: reading, continuing, listing and deleting."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest.mock import Mock

import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from aengine.errors import EngineFailedError, InvalidRequestError
from aengine.http.responses import kept as kept_responses
from aengine.http.responses.bodies import InputItem
from aengine.http.responses.kept import MAX_ITEMS, MAX_TURNS, KeptResponse, KeptResponses, encoded_input, items_of
from tests.http.fake_engine import WORDS, FakeEngine
from tests.http.responses.streams import check_order, parse
from tests.http.responses.test_create import ALL, PATH, F, saying
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)


async def respond(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def refused(server: Server, method: str, path: str, **body: Any) -> tuple[int, str]:
    answer = await server.client.request(method, path, json=body or None)
    return answer.status_code, answer.json()["error"]["message"]


async def test_nothing_is_kept_without_the_knob() -> None:
    async with serving() as server:
        response = await respond(server, input="one", store=True)
        assert response["store"] is False
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            status, message = await refused(server, method, f"{PATH}/{response['id']}{path}")
            assert (status, "knob kept_responses" in message) == (404, True)
        status, message = await refused(server, "POST", PATH, input="two", previous_response_id=response["id"])
        assert (status, "knob kept_responses" in message) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_response_is_read_again_and_forgotten(stream: bool) -> None:
    async with serving(kept_responses=2) as server:
        answer = await server.post(PATH, input="one", stream=stream)
        response = check_order(parse(answer.text)) if stream else answer.json()
        assert response["store"] is True
        path = f"{PATH}/{response['id']}"
        read = await server.client.get(path)
        assert read.json() == response
        Response.model_validate(read.json(), strict=True)
        assert await refused(server, "GET", f"{path}?stream=true") == (
            400,
            "stream: a kept response is not streamed again",
        )
        assert (await server.client.delete(path)).json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
        for method in ("GET", "DELETE"):
            assert (await refused(server, method, path))[0] == 404
        unkept = await respond(server, input="one", store=False)
        assert (await refused(server, "GET", f"{PATH}/{unkept['id']}"))[0] == 404


async def test_a_response_continues_kept_responses() -> None:
    engine = saying(*ALL)
    async with serving(engine, kept_responses=9) as server:
        first = await respond(server, input="one", tools=[F], instructions="not carried on")
        call = first["output"][2]
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "21"}]
        second = await respond(server, input=given, previous_response_id=first["id"])
        await respond(server, input="three", previous_response_id=second["id"], instructions="new")
        system, one, answer, result, further, three = engine.chats[-1].messages
        assert (system["content"], one["content"], result["content"]) == ("new", "one", "21")
        assert answer["reasoning_content"] == further["reasoning_content"] == "I call."
        assert answer["tool_calls"][0]["id"] == call["call_id"]
        assert three == {"role": "user", "content": "three"}
        assert second["previous_response_id"] == first["id"]
        # a deleted response cannot be continued, nor can one that continued it
        await server.client.delete(f"{PATH}/{first['id']}")
        status, message = await refused(server, "POST", PATH, input="x", previous_response_id=second["id"])
        assert (status, first["id"] in message) == (400, True)


async def test_the_items_that_a_response_answers() -> None:
    engine = saying(*ALL)
    async with serving(engine, kept_responses=9) as server:
        first = await respond(server, input="one", tools=[F], include=["reasoning.encrypted_content"])
        second = await respond(
            server,
            input=[
                {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "21"},
                {"role": "assistant", "content": "a"},
            ],
            previous_response_id=first["id"],
        )
        path = f"{PATH}/{second['id']}/input_items"
        listed = (await server.client.get(path, params={"order": "asc"})).json()
        ResponseItemList.model_validate(listed, strict=True)
        kinds = ["message", "reasoning", "message", "function_call", "function_call", "function_call_output", "message"]
        assert [item["type"] for item in listed["data"]] == kinds
        assert listed["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
        assert listed["has_more"] is False
        assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
        ids = [item["id"] for item in listed["data"]]
        backwards = (await server.client.get(path, params={"limit": 3})).json()
        assert [item["id"] for item in backwards["data"]] == ids[:-4:-1]
        assert backwards["has_more"] is True
        rest = (await server.client.get(path, params={"after": backwards["last_id"]})).json()
        assert [item["id"] for item in rest["data"]] == ids[-4::-1]
        for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
            answer = await server.client.get(path, params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


async def test_each_key_reads_its_own() -> None:
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    async with serving(kept_responses=9, api_keys=("mine", "yours")) as server:
        made = await server.client.post(PATH, json={"input": "one"}, headers=mine)
        path = f"{PATH}/{made.json()['id']}"
        assert (await server.client.get(path, headers=mine)).status_code == 200
        for method in ("GET", "DELETE"):
            assert (await server.client.request(method, path, headers=yours)).status_code == 404
        body = {"input": "two", "previous_response_id": made.json()["id"]}
        assert (await server.client.post(PATH, json=body, headers=yours)).status_code == 400
        assert (await server.client.post(PATH, json=body, headers=mine)).status_code == 200


async def test_a_response_that_failed_is_not_kept() -> None:
    async with serving(FakeEngine(held=True), kept_responses=9) as server:
        requested = asyncio.create_task(server.post(PATH, input="one", stream=True))
        (await server.engine.next_stream()).fail(EngineFailedError("x"))
        failed = parse((await requested).text)[-1]["response"]
        assert failed["status"] == "failed"
        assert (await refused(server, "GET", f"{PATH}/{failed['id']}"))[0] == 404


async def test_methods_that_a_response_does_not_have() -> None:
    async with serving() as server:
        answer = await server.client.put(f"{PATH}/resp_1", json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")
        answer = await server.client.get(PATH)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (await server.client.post(f"{PATH}/resp_1/cancel")).status_code == 404


def one(response_id: str, previous: str | None = None, size: int = 10, items: int = 1) -> KeptResponse:
    return KeptResponse(response_id, previous, (b"x" * (size - 2),), items, b"{}")


def test_the_one_that_was_used_longest_ago_is_forgotten_first() -> None:
    kept = KeptResponses(3, 1000)
    for name in "abc":
        kept.keep(None, one(name))
    assert kept.find(None, "a") is not None
    kept.keep(None, one("d"))
    assert [name for name in "abcd" if kept.find(None, name)] == ["a", "c", "d"]


def test_bytes_are_bounded_too() -> None:
    kept = KeptResponses(100, 100)
    for name in "abc":
        kept.keep(None, one(name, size=40))
    assert [name for name in "abc" if kept.find(None, name)] == ["b", "c"]
    kept.keep(None, one("d", size=101))
    assert [name for name in "abcd" if kept.find(None, name)] == ["b", "c"]
    assert kept.forget(None, "b")
    kept.keep(None, one("e", size=60))
    assert [name for name in "bce" if kept.find(None, name)] == ["c", "e"]


def test_continuing_a_response_marks_its_turns_as_used() -> None:
    kept = KeptResponses(3, 1000)
    kept.keep(None, one("a"))
    kept.keep(None, one("b", "a"))
    kept.keep(None, one("x"))
    assert [turn.id for turn in kept.turns(None, "b")] == ["a", "b"]
    kept.keep(None, one("c", "b"))
    assert kept.find(None, "x") is None
    assert [turn.id for turn in kept.turns(None, "c")] == ["a", "b", "c"]


def test_a_conversation_is_bounded() -> None:
    kept = KeptResponses(2 * MAX_TURNS, 10**6)
    for number in range(MAX_TURNS + 1):
        kept.keep(None, one(str(number), str(number - 1) if number else None))
    assert len(kept.turns(None, str(MAX_TURNS - 1))) == MAX_TURNS
    with pytest.raises(InvalidRequestError, match="more than"):
        kept.turns(None, str(MAX_TURNS))
    kept.keep(None, one("a", items=MAX_ITEMS - 1))
    kept.keep(None, one("b", "a"))
    kept.keep(None, one("c", "b"))
    assert len(kept.turns(None, "b")) == 2
    with pytest.raises(InvalidRequestError, match="previous_response_id: the conversation has more than 65536 items"):
        kept.turns(None, "c")


async def test_many_items_are_encoded_and_decoded_in_slices() -> None:
    items = [InputItem(type="reasoning", id=str(number)) for number in range(20_000)]
    for work in (
        encoded_input(items),
        listed([KeptResponse("a", None, await encoded_input(items), 1, b'{"output":[]}')]),
    ):
        task = asyncio.create_task(work)
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 15
    assert task.result() == items


async def listed(turns: list[KeptResponse]) -> list[InputItem]:
    return [item async for item in items_of(turns)]


async def test_one_slice_of_a_conversation_is_in_memory_at_a_time() -> None:
    given = await encoded_input([InputItem(role="user", content="x") for _ in range(20_000)])
    most = alive = 0
    async for _ in items_of([KeptResponse("a", None, given, 20_000, b'{"output":[]}')]):
        if alive % 5_000 == 0:
            most = max(most, sum(isinstance(one, InputItem) for one in gc.get_objects()))
        alive += 1
    assert alive == 20_000
    assert most < 2_500


async def test_a_page_of_items_takes_the_slices_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeEngine(), kept_responses=9) as server:
        response = await respond(server, input=[{"role": "user", "content": "x"}] * 9_000)
        decoder = Mock(wraps=kept_responses._inputs)
        monkeypatch.setattr(kept_responses, "_inputs", decoder)
        for order in ("asc", "desc"):
            page = (await server.client.get(f"{PATH}/{response['id']}/input_items", params={"order": order})).json()
            assert (len(page["data"]), page["has_more"]) == (20, True)
    assert decoder.decode.call_count == 2


@pytest.mark.parametrize("bounds", [(4, 10**6), (10**6, 40)], ids=["responses", "bytes"])
def test_no_caller_displaces_responses_within_anothers_share(bounds: tuple[int, int]) -> None:
    kept = KeptResponses(*bounds)
    for name in "abcd":
        kept.keep("greedy", one(name))
    for name in "xy":
        kept.keep("modest", one(name))
    assert [name for name in "abcd" if kept.find("greedy", name)] == ["c", "d"]
    for name in "efgh":
        kept.keep("greedy", one(name))
    assert [name for name in "xy" if kept.find("modest", name)] == ["x", "y"]
    assert [name for name in "efgh" if kept.find("greedy", name)] == ["g", "h"]
