"""Runs compilations in threads, each with a deadline and a deep stack; a long one lowers its priority."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aengine.errors import QueueFullError

T = TypeVar("T")

MAX_THREADS = 4
USUAL_SECONDS = 1.0  # a compilation that takes longer gets a lower priority
_LOWERED_BY = 5  # not more, because the compilation must end before its deadline
STACK_BYTES = 256 * 2**20  # address space, not memory: the compiler recurses, and a full stack ends the process


class CompileThreads:
    """Runs functions that cannot be stopped. A function that misses its deadline keeps its place until it ends."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_THREADS)

    async def run(self, work: Callable[[], T], seconds: float) -> T:
        """Run `work` in a thread and return its result.

        Raises `TimeoutError` if it takes longer than `seconds`, and `QueueFullError` if no place became free in time.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        began = False
        lowering: asyncio.TimerHandle | None = None

        def settle(result: T | None, error: Exception | None) -> None:
            self._places.release()
            if lowering is not None:
                lowering.cancel()
            if done.done():
                return  # the caller has stopped waiting
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # T may include None

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failure:  # noqa: BLE001 - the caller of run() gets it
                error = failure
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
                began = True
                try:
                    thread = _start(body)
                    lowering = loop.call_later(USUAL_SECONDS, lower_priority, thread.native_id, _LOWERED_BY)
                except RuntimeError:  # the system has no more threads
                    self._places.release()
                    raise
                return await done
        except TimeoutError:
            if began:
                raise
            raise QueueFullError("too many grammars are being compiled", retry_after=seconds) from None


def lower_priority(thread_id: int | None = None, by: int = 10) -> None:
    """Lower the priority of a thread, by default this one, if the system has priorities of threads.

    An engine on a CPU needs every core for its steps. by: 5 leaves a third of a normal thread's share if they compete;
    10 leaves a tenth.
    """
    if sys.platform == "linux":
        with suppress(ProcessLookupError):  # it has ended
            thread_id = thread_id or threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + by)


def _start(body: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread: work that cannot be stopped must not keep the process alive."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=body, name="aengine-grammar", daemon=True)
        thread.start()
        return thread
    finally:
        threading.stack_size(usual)
