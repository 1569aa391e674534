"""Two thousand requests at once: each is answered or refused at once, none hangs, and all memory is freed."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.cli.running import Served, served
from tests.reliability.prober import Probe, percentile, probing
from tests.reliability.raw_clients import Answer, ask, numbers, port_of

pytestmark = [pytest.mark.anyio, pytest.mark.alone]

BURST, QUEUE, ROWS = 2000, 256, 256
REFUSED_WITHIN = 40.0  # seconds for the last refusal; 2.5 to 4 on a quiet machine, half of it the client's
HEALTHY_WITHIN = 0.02  # seconds, half of the times; a busy machine spoils the others, 99 of 100 need 0.05 in quiet


async def test_two_thousand_at_once_against_a_bounded_queue() -> None:
    with served("--max-queue", str(QUEUE), "--max-num-seqs", str(ROWS)) as server:
        healthy: list[float] = []
        while len(healthy) < 4 and min(healthy, default=HEALTHY_WITHIN) >= HEALTHY_WITHIN:  # the machine may be busy
            healthy.append(await burst(server))
        assert min(healthy) < HEALTHY_WITHIN


async def burst(server: Served) -> float:
    """The median of the times in which `/health` answers meanwhile, once all are accepted, in seconds."""
    port = port_of(server)
    async with probing(port) as probes:
        began = time.monotonic()
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(work(port, f"Number {at} is") for at in range(BURST)))
        accepted = max(answer.began for answer in answers)
    answered = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 503]

    assert len(answered) + len(refused) == BURST
    assert len(answered) >= QUEUE  # and running ones
    for answer in answered:
        assert b'"finish_reason":"length"' in answer.body
        assert answer.body.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    for answer in refused:
        assert "\nretry-after: 1\r" in answer.headers
        assert json.loads(answer.body)["error"]["code"] == "queue_full"
    slowest = max(answer.ended for answer in refused) - began
    assert slowest < REFUSED_WITHIN

    calm = [probe for probe in probes if probe.asked > accepted]
    report(answers, probes, calm, began)
    assert all(probe.status == 200 for probe in probes)

    after = numbers(server)
    assert after["aengine_kv_pages_used"] == 0
    assert after["aengine_requests_running"] == after["aengine_requests_waiting"] == 0
    assert server.client.post("/flush_cache").status_code == 200
    emptied = numbers(server)
    assert emptied["aengine_kv_pages_free"] == emptied["aengine_kv_pages"]  # every page is back: the pool is whole
    assert ask_again(server) == 200
    return percentile([probe.seconds for probe in calm], 0.5)


async def work(port: int, prompt: str) -> Answer:
    return await ask(port, "/generate", prompt=prompt, max_tokens=16, ignore_eos=True)


def ask_again(server: Served) -> int:
    return server.client.post("/generate", json={"prompt": "One two", "stream": False}).status_code


def report(answers: list[Answer], probes: list[Probe], calm: list[Probe], began: float) -> None:
    """Print the figures (`pytest -s` shows them)."""
    refused = sorted(answer.ended - began for answer in answers if answer.status == 503)
    print(f"\n{len(answers) - len(refused)} answered, {len(refused)} refused, the last after {refused[-1]:.2f} s")
    for name, some in (("during all of it", probes), ("once accepted", calm)):
        seconds = [probe.seconds * 1000 for probe in some]
        print(f"/health {name}: {len(seconds)} asked, p99 {percentile(seconds, 0.99):.1f} ms, worst {max(seconds):.1f}")
