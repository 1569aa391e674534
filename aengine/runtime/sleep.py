"""Device memory that an engine gives back while it sleeps."""

from __future__ import annotations

from typing import Protocol


class SleepableMemory(Protocol):
    """The memory of a model's weights and of its KV pools. Nothing runs on the device while a method does."""

    def sleep(self) -> None:
        """Move the weights to host memory, drop keys and values, and give the device's memory back. Blocks.

        Where it raises, all is as it was.
        """
        ...

    def wake(self) -> None:
        """Bring the weights back to where they were, with empty pages. Blocks.

        Raises `OutOfMemoryError` where others have taken the memory meanwhile: then all sleeps on.
        """
        ...

    def close(self) -> None:
        """Let go of host memory. To be called behind the runner's `close`."""
        ...


class HostSleep:
    """On a CPU, where weights lie in host memory anyway: nothing moves."""

    def sleep(self) -> None:
        """There is no device whose memory could be given back."""

    def wake(self) -> None:
        """All is where it was."""

    def close(self) -> None:
        """There is nothing to let go of."""
