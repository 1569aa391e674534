"""What new requests pass before they are enqueued."""

from __future__ import annotations

import asyncio

from aengine.errors import EngineNotReadyError, QueueFullError


class Gate:
    """Lets requests in, refuses them, or holds them until it opens."""

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self.refusal = ""  # why they are refused
        self._opening: asyncio.Event | None = None  # None: nobody is held
        self.held = 0

    @property
    def holding(self) -> bool:
        """Whether requests that come wait."""
        return self._opening is not None

    def check(self) -> None:
        """Raise `EngineNotReadyError` where requests are refused."""
        if self.refusal:
            raise EngineNotReadyError(self.refusal)

    async def enter(self) -> None:
        """Wait until requests are let in. Raises `EngineNotReadyError`, and `QueueFullError` where too many wait."""
        while True:
            self.check()
            if self._opening is None:
                return
            if self.held >= self._most_held:
                raise QueueFullError(f"{self.held} requests wait until the weights are reloaded, which is the most")
            self.held += 1
            try:
                await self._opening.wait()
            finally:
                self.held -= 1

    def refuse(self, why: str) -> None:
        """Refuse requests from now on, those as well that are held."""
        self.refusal = why
        self._release()

    def hold(self) -> None:
        """Hold requests from now on."""
        self.refusal = ""
        self._opening = self._opening or asyncio.Event()

    def open(self) -> None:
        """Let requests in, those first that are held."""
        self.refusal = ""
        self._release()

    def _release(self) -> None:
        if self._opening is not None:
            self._opening.set()
            self._opening = None
