"""The GPUs of one model: each call is enqueued on the device and the stream of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class DeviceRanks:
    """`Together` on several GPUs. Kernels of one wait for those of the others on the device.

    Few launches go out from the caller's thread, rank by rank. Hundreds may fill the queue of a device whose first
    kernels wait for another's, so each rank has a thread for them: one that is held up lets go of the interpreter.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """streams: of each rank, on its device."""
        self.streams = streams
        self._workers = [ThreadPoolExecutor(1, f"aengine-rank-{rank}") for rank in range(len(streams))]

    def __call__(self, calls: Sequence[Callable[[], T]], short: bool = False) -> list[T]:
        if short or len(calls) == 1:
            return [self._on(rank, call) for rank, call in enumerate(calls)]
        futures = [worker.submit(self._on, rank, calls[rank]) for rank, worker in enumerate(self._workers)]
        errors = [error for error in map(Future.exception, futures) if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _on(self, rank: int, call: Callable[[], T]) -> T:
        with torch.inference_mode(), torch.cuda.stream(self.streams[rank]):
            return call()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Every rank's stream is its device's current one, and the first rank's device the current device."""
        with ExitStack() as stack:
            for stream in reversed(self.streams):
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def synchronize(self) -> None:
        """Wait for all of them."""
        for stream in self.streams:
            stream.synchronize()

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=True)
