"""`Client`'s methods that change what lies on the server's device: `sleep`, `wake_up` and `reload`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aengine.errors import ServerError
from aengine.types import SleepMode


class Sleeping(ABC):
    """Arguments and errors are those of `Engine`'s methods of the same names; and `ServerError` where the server's
    knobs allow it to nobody. However long they take, they are waited for.
    """

    @abstractmethod
    async def get(self, path: str) -> dict[str, Any]: ...

    @abstractmethod
    async def _operate(self, path: str, fields: Mapping[str, Any]) -> None:
        """POST fields, however long the answer takes. Raises what it says instead of a success."""
        ...

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Let the engine move its weights to host memory and give its device's memory back."""
        await self._operate(f"/sleep?level={int(level)}&mode={mode}", {})

    async def wake_up(self) -> None:
        """Let the engine take its device's memory again, and serve."""
        await self._operate("/wake_up", {})

    async def reload(self, folder: str | Path | None = None) -> None:
        """Let the engine read the weights of a folder below the server's `reload_folders`. None: its own once more."""
        await self._operate("/reload", {} if folder is None else {"folder": str(folder)})

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        sleeping = (await self.get("/is_sleeping")).get("is_sleeping")
        if not isinstance(sleeping, bool):
            raise ServerError("the server does not say whether its engine sleeps")
        return sleeping
