"""A step that raises ends its own requests with a clear error. Other requests are unaffected."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.serving import parse_events
from tests.reliability import faulty
from tests.reliability.faulty import LAUNCH_ERROR, NAN, OUT_OF_MEMORY, STEP_ERROR

pytestmark = pytest.mark.anyio

ROWS = 4
LENGTH = 20
REQUESTS = 8
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_tokens": LENGTH, "temperature": 1, "seed": 5, "ignore_eos": True}


def asked(number: int, trigger: int | None = None) -> dict[str, object]:
    ids = [300 + number, 301, 302]
    return {"input_ids": ids if trigger is None else [*ids, trigger], **(SEEDED if number % 2 else GREEDY)}


async def answer(client: httpx2.AsyncClient, body: dict[str, object]) -> tuple[list[int], str]:
    """The ids that came, and the error that ended them."""
    events = parse_events((await client.post("/generate", json=body)).text)
    ids = [token for event in events if "token_ids" in event for token in event["token_ids"]]
    return ids, next((event["error"]["message"] for event in events if "error" in event), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trigger", "told"),
    [
        pytest.param(OUT_OF_MEMORY, "OutOfMemoryError", marks=pytest.mark.slow),
        pytest.param(LAUNCH_ERROR, "RuntimeError", marks=pytest.mark.slow),
        (STEP_ERROR, "RuntimeError"),
        pytest.param(NAN, "NaN", marks=pytest.mark.slow),
    ],
)
async def test_only_whom_it_carried(trigger: int, told: str) -> None:
    """Four requests run, and one breaks the step. Five wait, and more come later."""
    engine = DemoEngine(max_num_seqs=ROWS, torch_threads=1, start=faulty.start)
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        alone = [await answer(client, asked(number)) for number in range(REQUESTS)]
        assert all(len(ids) == LENGTH and not error for ids, error in alone)
        others = [asyncio.create_task(answer(client, asked(number))) for number in range(ROWS - 1)]
        while engine.stats().running < ROWS - 1:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        breaking = asyncio.create_task(answer(client, asked(0, trigger)))
        while engine.stats().running < ROWS:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        others += [asyncio.create_task(answer(client, asked(number))) for number in range(ROWS - 1, REQUESTS)]
        async with asyncio.timeout(60):
            ids, error = await breaking
            together = await asyncio.gather(*others)
        assert told in error
        assert 1 < len(ids) <= 1 + faulty.DECODES
        ended = [error for _, error in together if error]
        assert len(ended) == 0 if trigger == NAN else 1 <= len(ended) < ROWS
        assert all(told in error for error in ended)
        for (ids, error), (expected, _) in zip(together, alone, strict=True):
            assert ids == expected[: len(ids)]
            assert error or len(ids) == LENGTH
        assert await answer(client, asked(3)) == alone[3]
        assert (await client.get("/health")).status_code == 200
        assert engine.stats().running == 0
        engine.check_integrity()
