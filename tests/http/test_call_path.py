"""The functions and files of the HTTP layer that one streamed chat passes. A reader must know them all."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import aengine.http
from aengine.text.answer.parser import AnswerFormat
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

FUNCTIONS, FILES = 66, 17
ROOM = Path(aengine.http.__file__).parent
ALWAYS = {ROOM / "loop_delay.py"}  # runs all the time
EACH_SECOND = {  # functions that run every second
    "OpenConnections._poll",
    "AcceptedConnection.poll",
    "InFlight.watch_readers",
    "InFlight._disconnect_stalled",
}


async def test_a_streamed_chat_passes_few_functions_of_few_files() -> None:
    engine = FakeEngine()
    engine.answer_format = AnswerFormat(thoughts=True)
    seen: set[tuple[Path, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_qualname in EACH_SECOND or code.co_name.startswith("<"):
            return  # a comprehension is not a function of its own to a reader
        if (path := Path(code.co_filename)).is_relative_to(ROOM) and path not in ALWAYS:
            seen.add((path.relative_to(ROOM), code.co_qualname))

    async with serving(engine) as server:
        chat = {"messages": [{"role": "user", "content": "hello there"}], "stream": True, "temperature": 0}
        await server.events("/v1/chat/completions", **chat)  # open the connection, and fill the caches
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            events = await server.events("/v1/chat/completions", **chat)
        finally:
            sys.setprofile(before)
    assert len(events) > len(engine.words)
    assert len(seen) <= FUNCTIONS, sorted(map(str, seen))
    files = {path for path, _ in seen}
    assert len(files) <= FILES, sorted(map(str, files))
    assert {Path("openai/chat.py"), Path("streams/sse.py")} <= files
