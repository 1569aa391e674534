"""Threads of compilations: a long one lowers its priority, a short one does not."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from aengine.text.grammar import threads
from aengine.text.grammar.threads import CompileThreads

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's"),
]

USUAL = os.getpriority(os.PRIO_PROCESS, 0)


def own_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_long_compilation_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "USUAL_SECONDS", 0.01)

    def work() -> int:
        end = time.monotonic() + 10
        while own_priority() == USUAL and time.monotonic() < end:
            time.sleep(0.001)
        return own_priority()

    assert await CompileThreads().run(work, 30) == min(USUAL + 5, 19)


async def test_a_short_one_does_not() -> None:
    assert await CompileThreads().run(own_priority, 30) == USUAL


async def test_what_has_ended_is_not_looked_for() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    threads.lower_priority(thread.native_id)
    assert own_priority() == USUAL
