"""A device that is lost for good: everyone hears of it at once, health says so, and `aengine serve` leaves with 1."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import httpx2
import pytest

import aengine
from aengine import EngineFailedError
from aengine.errors import DeviceLostError
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.serving import parse_events
from tests.reliability import faulty
from tests.reliability.faulty import DEATH, LATE_DEATH
from tests.reliability.processes import process, told

pytestmark = pytest.mark.anyio

ENDLESS = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def killer(trigger: int) -> dict[str, Any]:
    return {"input_ids": [300, trigger], **ENDLESS}


async def held(engine: aengine.Engine, gate: asyncio.Event, entered: list[str]) -> None:
    """Whoever tokenizes text or compiles a grammar stays there until the gate opens."""
    ready = engine._ready()
    encode, matcher = ready.tokenizer.encode, ready.grammars.matcher

    async def late_encode(*args: Any, **options: Any) -> Any:
        entered.append("encode")
        await gate.wait()
        return await encode(*args, **options)

    async def late_matcher(*args: Any) -> Any:
        entered.append("compile")
        await gate.wait()
        return await matcher(*args)

    ready.tokenizer.encode = late_encode  # type: ignore[method-assign]
    ready.grammars.matcher = late_matcher  # type: ignore[method-assign]


@pytest.mark.parametrize("trigger", [DEATH, LATE_DEATH])
async def test_every_waiter_hears_of_it(trigger: int) -> None:
    """Running, queued, being tokenized, being compiled, and arriving while the device dies or after it did."""
    engine = DemoEngine(max_num_seqs=4, torch_threads=1, start=faulty.start)
    async with (
        hosted_demo(engine) as url,
        httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=httpx2.Limits()) as client,
    ):
        runner: faulty.Faulty = engine._ready().runtime.runner  # type: ignore[assignment]
        gate, entered = asyncio.Event(), []
        await held(engine, gate, entered)

        async def ask(stream: bool, **body: Any) -> httpx2.Response:
            return await client.post("/generate", json={**ENDLESS, "stream": stream, **body})

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            asks = [tasks.create_task(ask(number % 2 == 0, input_ids=[310 + number])) for number in range(10)]
            asks.append(tasks.create_task(ask(True, prompt="text")))
            asks.append(tasks.create_task(ask(False, input_ids=[1, 2], guided_regex="a+")))
            while engine.stats().running < 4 or engine.stats().waiting < 6 or len(entered) < 2:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            asks.append(tasks.create_task(ask(True, priority=-1, **killer(trigger))))
            # The killer waits for a row. One running request must end first.
            next(iter(engine._service.requests._live.values())).stream.abort()
            await runner.dying.wait()
            asks += [tasks.create_task(ask(stream, input_ids=[5])) for stream in (True, False)]
            await engine.failed.wait()
            gate.set()
            asks.append(tasks.create_task(ask(True, input_ids=[6])))
        answers = [task.result() for task in asks]
        aborted, *rest = answers
        assert '"abort"' in aborted.text
        for response in rest:
            if response.status_code == 200:
                *_, last = parse_events(response.text)
                assert last["error"]["code"] == "engine_failed"
            else:
                assert response.status_code in (500, 503), response.text
                assert (
                    "device is lost" in response.text
                    or "AcceleratorError" in response.text
                    or "DeviceLost" in response.text
                )
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert "the device is lost" in response.json()["reason"]
        assert (await client.get("/metrics")).status_code == 200
        assert isinstance(engine.failure, DeviceLostError)
        assert runner.launches_after_death == 0  # nothing is tried on it again
        with pytest.raises(EngineFailedError):
            await engine.complete([5])


@pytest.mark.slow
@pytest.mark.parametrize("trigger", [DEATH, LATE_DEATH])
def test_the_server_ends_streams_and_leaves_with_1(trigger: int) -> None:
    with process("tests.reliability.faulty", "--port", "0") as running:
        url = told(running, r"Serving on (\S+)")[1]
        with (
            httpx2.Client(base_url=url, timeout=20, trust_env=False) as client,
            client.stream("POST", "/generate", json={"input_ids": [7], **ENDLESS}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            killed = client.post("/generate", json=killer(trigger))
            began = time.monotonic()
            *_, last = (line for line in lines if line)
            heard, _ = running.communicate(timeout=20)
    assert '"engine_failed"' in killed.text
    assert '"engine_failed"' in last
    assert "unspecified launch failure" in heard  # in the log
    assert "aengine: the engine failed: the device is lost" in heard
    assert running.returncode == 1
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_under_bare_hypercorn_every_request_is_an_error_until_it_is_stopped() -> None:
    with process("hypercorn", "-w", "0", "-b", "127.0.0.1:0", "tests.reliability.faulty:app") as running:
        url = told(running, r"Running on (\S+)")[1]
        with httpx2.Client(base_url=url, timeout=20, trust_env=False) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.05)
            assert '"engine_failed"' in client.post("/generate", json=killer(DEATH)).text
            for _ in range(3):
                refused = client.post("/generate", json={"input_ids": [7], **ENDLESS})
                assert refused.status_code == 503
                assert "the device is lost" in refused.text
            assert client.get("/health").status_code == 503
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=20)
    assert running.returncode == 0
