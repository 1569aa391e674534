"""`GET /v1/models`."""

from __future__ import annotations

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CARD = {
    "id": "fake",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "aengine",
    "root": "fake",
    "parent": None,
    "max_model_len": 64,
}


async def test_lists_the_model() -> None:
    async with serving() as server:
        assert (await server.client.get("/v1/models")).json() == {"object": "list", "data": [CARD]}
        assert (await server.client.get("/v1/models/fake")).json() == CARD


async def test_under_the_name_that_the_operator_gave_it() -> None:
    async with serving(served_model_name="org/mine") as server:
        assert (await server.client.get("/v1/models/org/mine")).json() == CARD | {"id": "org/mine"}
        response = await server.client.get("/v1/models/fake")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
