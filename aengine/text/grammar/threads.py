"""Runs compilations in threads of their own, each with a deadline and a deep stack."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from aengine.errors import QueueFullError

T = TypeVar("T")

MAX_THREADS = 4
STACK_BYTES = 256 * 2**20  # address space, not memory: the compiler recurses, and without room it ends the process


class CompileThreads:
    """Runs functions that cannot be stopped. One that is past its deadline keeps its place until it is done."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_THREADS)

    async def run(self, work: Callable[[], T], seconds: float) -> T:
        """Run `work` in a thread and return what it returns. Raises `TimeoutError`, and `QueueFullError` where no place
        became free in time.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        began = False

        def settle(result: T | None, error: Exception | None) -> None:
            self._places.release()
            if done.done():
                return  # nobody waits any more
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # T may include None

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failure:  # noqa: BLE001 - it belongs to whoever waits
                error = failure
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
                began = True
                try:
                    _start(body)
                except RuntimeError:  # the system gives no more threads
                    self._places.release()
                    raise
                return await done
        except TimeoutError:
            if began:
                raise
            raise QueueFullError("too many grammars are being compiled", retry_after=seconds) from None


def _start(body: Callable[[], None]) -> None:
    """Start a daemon thread: what cannot be stopped must not keep the process alive."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=body, name="aengine-grammar", daemon=True).start()
    finally:
        threading.stack_size(usual)
