"""The load generator: against a server whose numbers are known, and against ones that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bench import serve
from bench.null_server import null_server
from bench.serve import Load, at_concurrency, at_rate, figures_of, percentile
from bench.sse_client import EventStream, Reply, Target, ask, first_model
from bench.workloads import STANDARD, Session, Turn, add_options, sessions
from tests.http.demo_server import hosted_demo

pytestmark = pytest.mark.anyio


def workload_options(**changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})


@asynccontextmanager
async def null_target(first_ms: float = 0.0, gap_ms: float = 0.0) -> AsyncIterator[Target]:
    server = await null_server(0, first_ms, gap_ms)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def load_on(target: Target) -> Load:
    return Load(target, "null", {}, patience=30.0)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Target]:
    """A server that says these bytes to everyone and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_what_the_server_does_is_what_is_measured() -> None:
    async with null_target(first_ms=40, gap_ms=5) as target:
        load = load_on(target)
        began = time.perf_counter()
        await at_concurrency(load, [Session([Turn([1, 2, 3], 21)]) for _ in range(6)], 3)
        figures = figures_of(load, time.perf_counter() - began, 0.0, {"ttft": 30})
    assert figures["requests"] == 6
    assert figures["failed"] == 0
    assert figures["goodput_s"] == 0  # no first token within 30 ms
    assert figures["tokens_per_event"] == 1
    assert [reply.prompt_tokens for reply in load.replies] == [3] * 6
    assert [reply.completion_tokens for reply in load.replies] == [21] * 6
    for name, least in (("ttft_ms_p50", 40), ("tpot_ms_p50", 5), ("e2e_ms_p50", 140)):
        value = figures[name]
        assert value is not None
        assert least - 2 <= value  # the upper side is the machine's


async def test_a_stream_reads_the_same_however_its_bytes_are_cut() -> None:
    events = b"".join(
        b"data: %b\n\n" % msgspec.json.encode({"choices": [{"text": word}]}) for word in ("a", "é", "c" * 300)
    )
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    events += b": comment\r\n\r\ndata:%b\r\n\r\ndata: [DONE]\n\n" % msgspec.json.encode({"choices": [], "usage": usage})
    rng = random.Random(0)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(events)), 6))
        pieces = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
        wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire += b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        reply = Reply(0.0)
        stream = EventStream(b"", reply, keep_text=True)
        at = 0
        while at < len(wire):
            step = rng.randint(1, 40)
            stream.data_received(wire[at : at + step])
            at += step
        assert stream.done.done()
        assert reply.failed is None
        assert "".join(reply.text) == "aé" + "c" * 300
        assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (7, 9, 4)
        assert len(reply.times) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", "503 Busy"),
        (b"", "no answer"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {", "closed before the end"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":"broken"}\n\ndata: [DONE]\n\n', "broken"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n', "no usage"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunked"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {]\n\ndata: [DONE]\n\n", "no JSON"),
    ],
)
async def test_what_fails_is_counted_with_its_reason(answer: bytes, reason: str) -> None:
    async with answering(answer) as target:
        load = load_on(target)
        await at_concurrency(load, [Session([Turn([1], 4)])], 1)
    assert reason in str(load.replies[0].failed)
    assert figures_of(load, 1.0, 0.0, {})["failed"] == 1


async def test_a_stream_that_ends_with_its_usage_is_whole_without_done() -> None:
    events = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"usage":{"prompt_tokens":1,"completion_tokens":4}}\n\n'
    for head, body in (
        (b"", events),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)),
    ):
        async with answering(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body) as target:
            reply = await ask(target, target.request("POST", "/v1/completions", b"{}"), patience=5.0)
        assert reply.failed is None
        assert reply.completion_tokens == 4


async def test_nobody_there_is_a_failure_too() -> None:
    reply = await ask(Target("http://127.0.0.1:9"), b"", patience=5.0)
    assert "ConnectionRefused" in str(reply.failed)


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async with null_target(first_ms=60_000) as target:
        request = target.request("POST", "/v1/completions", b"{}")
        assert "TimeoutError" in str((await ask(target, request, patience=0.05)).failed)


async def test_arrivals_come_at_their_rate() -> None:
    async with null_target() as target:
        load = load_on(target)
        began = time.perf_counter()
        await at_rate(load, [Session([Turn([1], 1)]) for _ in range(101)], 400, seed=0)
        assert time.perf_counter() - began > 100 / 400 * 0.7
        assert len(load.late) == len(load.replies) == 101
        await at_rate(load, [Session([Turn([1], 1)])] * 5, math.inf, seed=0)
        assert len(load.replies) == 106


async def test_the_workloads_have_their_lengths() -> None:
    options = workload_options(requests=3)
    for name, asked, output in (("random-128-2048", 128, 2048), ("random-7-9", 7, 9)):
        work = sessions(name, options)
        assert [(len(s.turns[0].prompt), s.turns[0].output) for s in work] == [(asked, output)] * 3
    assert sessions("random-128-128", options) == sessions("random-128-128", options)  # seeded
    shared = sessions("shared-prefix", workload_options(groups=4, prompts=5, system=64, question=8))
    assert len(shared) == 20
    assert len({tuple(session.turns[0].prompt[:64]) for session in shared}) == 4
    assert {len(session.turns[0].prompt) for session in shared} == {72}
    with pytest.raises(ValueError, match=r"unknown workload.*shared-prefix"):
        sessions("sharegpt", options)
    assert all(sessions(name, options) for name in STANDARD)


async def test_a_chat_on_the_real_server_finds_what_was_said_before_in_its_cache() -> None:
    async with hosted_demo() as url:
        target = Target(url)
        load = Load(target, await first_model(target), {}, patience=60.0)
        options = workload_options(conversations=2, turns=3, think=0.0, output=12)
        await at_concurrency(load, sessions("chat", options), 2)
    assert [reply.failed for reply in load.replies] == [None] * 6
    assert [reply.completion_tokens for reply in load.replies] == [12] * 6
    assert sum(reply.cached_tokens for reply in load.replies) > 0.5 * sum(r.prompt_tokens for r in load.replies)


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0], 100) == 3.0
    assert percentile([7.0], 99) == 7.0


def test_where_every_request_failed_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = tmp_path / "plot.svg"
    asked = ["--url", "http://127.0.0.1:1", "--model", "m", "--workload", "random-8-8", "--requests", "2"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *asked, "--concurrency", "1", "--plot", str(plot)])
    with pytest.raises(SystemExit, match="no request succeeded"):
        serve.main()
    assert not plot.exists()
