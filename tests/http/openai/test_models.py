"""`GET /v1/models`."""

from __future__ import annotations

import anthropic
import openai
import pytest
from anthropic.types import ModelInfo
from openai.types import Model

from tests.http.fake_engine import CARD
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


async def test_lists_the_model() -> None:
    async with serving() as server:
        assert (await server.client.get("/v1/models")).json() == {
            "data": [CARD],
            "object": "list",
            "has_more": False,
            "first_id": "fake",
            "last_id": "fake",
        }
        assert (await server.client.get("/v1/models/fake")).json() == CARD


async def test_under_several_names_of_which_answers_show_the_first() -> None:
    async with serving(served_model_name=("mine", "org/alias")) as server:
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["mine", "org/alias"]
        assert (await server.client.get("/v1/models/org/alias")).json()["id"] == "org/alias"
        for name in ("mine", "org/alias"):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert (await server.client.post("/v1/completions", json=body)).json()["model"] == "mine"
        refused = await server.client.post("/v1/completions", json={"model": "/models/fake", "prompt": "a"})
    assert refused.status_code == 404
    assert "serves 'mine', 'org/alias'" in refused.json()["error"]["message"]


async def test_the_folders_path_is_a_name_that_is_not_listed() -> None:
    async with serving() as server:
        for name in ("/models/fake", "/models/fake/", "fake"):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert (await server.client.post("/v1/completions", json=body)).json()["model"] == "fake"
        assert (await server.client.get("/v1/models/%2Fmodels%2Ffake")).json()["id"] == "fake"
        assert [card["id"] for card in (await server.client.get("/v1/models")).json()["data"]] == ["fake"]


async def test_under_the_name_that_the_operator_gave_it() -> None:
    async with serving(served_model_name="org/mine") as server:
        assert (await server.client.get("/v1/models/org/mine")).json() == CARD | {
            "id": "org/mine",
            "display_name": "org/mine",
        }
        response = await server.client.get("/v1/models/fake")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_each_client_reads_it_in_its_own_form() -> None:
    async with serving() as server:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            (listed,) = [one async for one in client.models.list()]
            assert ModelInfo.model_validate_json((await client.models.retrieve("fake")).to_json()) == listed
            assert (listed.id, listed.display_name, listed.max_input_tokens) == ("fake", "fake", 64)
            assert listed.created_at.timestamp() == CARD["created"]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            (one,) = [one async for one in other.models.list()]
            assert Model.model_validate_json(one.to_json()) == one == await other.models.retrieve("fake")
