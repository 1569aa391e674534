"""Device memory that an engine frees while it sleeps."""

from __future__ import annotations

from typing import Protocol


class SleepableMemory(Protocol):
    """The memory of a model's weights and KV pools. No step may run during a call."""

    def sleep(self) -> None:
        """Move the weights to host memory, drop keys and values, and free the device memory. Blocks.

        If it raises, nothing has changed.
        """
        ...

    def wake(self) -> None:
        """Copy the weights back to their old device addresses, and map empty KV pools. Blocks.

        Raises: OutOfMemoryError if other processes use the memory now. The engine then stays asleep.
        """
        ...

    def close(self) -> None:
        """Free host memory. Call it after the runner's `close`."""
        ...


class HostSleep:
    """`SleepableMemory` on a CPU. The weights are in host memory already, so nothing moves."""

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
