"""A line from a replica to an ingress: many answers in one stream, in order, complete, with bounded memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from aengine.http.entry.errors import HTTPError
from aengine.ray_serve import line as line_module
from aengine.ray_serve.line import Inbox, LineBrokenError, LineOut, deliver

pytestmark = pytest.mark.anyio


async def read(line: LineOut, inboxes: dict[int, Inbox]) -> int:
    """Deliver batches until the line ends, and return their number."""
    batches = 0
    async for batch in line.batches():
        deliver(batch, inboxes)
        batches += 1
        await asyncio.sleep(0)
    return batches


async def text(inbox: Inbox) -> bytes:
    return b"".join([piece async for piece in inbox.pieces()])


async def test_each_call_gets_its_own_pieces_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_IDLE_SECONDS", 0.01)
    line, inboxes = LineOut(0), {number: Inbox() for number in range(8)}

    async def answer(number: int) -> None:
        line.begin()
        for place in range(50):
            await line.put(number, b"%d " % place)
            await asyncio.sleep(0)
        line.end(number)

    reading = asyncio.create_task(read(line, inboxes))
    await asyncio.gather(*map(answer, range(8)))
    for inbox in inboxes.values():
        assert (await text(inbox)).split() == [b"%d" % place for place in range(50)]
    assert await reading < 120  # of 400 pieces


async def test_it_stays_open_while_there_is_a_call_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_IDLE_SECONDS", 0.01)
    line, inbox = LineOut(0), Inbox()
    line.begin()
    reading = asyncio.create_task(read(line, {1: inbox}))
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done
    line.end(1)
    await asyncio.wait_for(reading, 60)
    assert not line.open
    assert await text(inbox) == b""


async def test_a_writer_waits_for_room_and_is_let_go_when_the_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_MAX_WAITING_BYTES", 10)
    line = LineOut(0)
    line.begin()
    async with aclosing(line.batches()) as batches:
        await anext(batches)
        blocked = asyncio.create_task(line.put(1, b"x" * 11))
        await asyncio.sleep(0)
        assert not blocked.done()
        await anext(batches)
        await asyncio.wait_for(blocked, 60)
        blocked = asyncio.create_task(line.put(1, b"x" * 11))
        await asyncio.sleep(0)
        assert not blocked.done()
    await asyncio.wait_for(blocked, 60)
    await line.put(1, b"x" * 100)  # it would not be read


async def test_pieces_of_a_call_that_is_no_more_are_dropped() -> None:
    line, inbox = LineOut(0), Inbox()
    line.begin()
    await line.put(1, b"gone")
    await line.put(2, b"here")
    line.end(2)
    async with aclosing(line.batches()) as batches:
        await anext(batches)
        deliver(await anext(batches), {2: inbox})
    assert await text(inbox) == b"here"


async def test_a_broken_line_gives_its_pieces_and_then_fails() -> None:
    inbox = Inbox()
    inbox.put(b"a")
    inbox.put(b"b")
    inbox.fail()
    pieces = inbox.pieces()
    assert await anext(pieces) == b"ab"
    with pytest.raises(LineBrokenError):
        await anext(pieces)


async def test_an_answer_that_is_whole_does_not_fail_with_the_line() -> None:
    inbox = Inbox()
    inbox.put(b"a")
    inbox.put(0)
    inbox.fail()
    assert await text(inbox) == b"a"


async def test_only_the_stream_of_a_slow_client_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_MAX_UNREAD_BYTES", 10)
    slow, other = Inbox(), Inbox()
    for _ in range(3):
        slow.put(b"12345")
        other.put(b"1")
    other.put(0)
    assert await text(other) == b"111"
    with pytest.raises(HTTPError, match="15 bytes"):
        await text(slow)
