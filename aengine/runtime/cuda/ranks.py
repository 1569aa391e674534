"""Launches work on the GPUs of one model, each call on the device and stream of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from aengine.errors import DeviceLostError

if TYPE_CHECKING:
    from aengine.kernels.collective.peers import PeerCollective

T = TypeVar("T")


class DeviceRanks:
    """`RankLauncher` on several GPUs. Kernels of one GPU wait for those of the others on the device.

    The caller's thread makes short calls, rank by rank. Each rank's own thread makes all other calls, because a launch
    can block for two reasons. Many launches fill the queue of a device whose first kernels wait for another device. And
    CUDA loads a kernel on first use only when its device is idle.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], collectives: Sequence[PeerCollective] = ()) -> None:
        """streams: one for each rank, on its device. collectives: one for each rank, none for a single rank."""
        self.streams = streams
        self.collectives = collectives
        self._patience = 0.0
        self._workers = [ThreadPoolExecutor(1, f"aengine-rank-{rank}") for rank in range(len(streams))]

    def __call__(self, calls: Sequence[Callable[[], T]], short: bool = False) -> list[T]:
        try:
            if short or len(calls) == 1:
                return [self._on(rank, call) for rank, call in enumerate(calls)]
            futures = [
                worker.submit(self._on, rank, call) for rank, (worker, call) in enumerate(zip(self._workers, calls))
            ]
            wait(futures)
            results = []
            while futures:  # pop: a frame that keeps the future of its own error would keep the step's memory alive
                results.append(futures.pop(0).result())
            return results
        except BaseException:
            if self.collectives:  # some ranks have launched kernels that wait for ranks which failed
                self.wait_for_each_other(self._patience)
            raise

    def wait_for_each_other(self, patience: float) -> None:
        """Set how many seconds kernels wait for kernels of other ranks. Waits for the devices.

        0: kernels do not wait. This is for rehearsals, in which ranks compile and load kernels at different times.
        """
        from aengine.kernels.collective.peers import reset_collectives  # imports kernels

        self._patience = patience
        reset_collectives(self.collectives, patience)

    def check_answers(self) -> None:
        """Wait for the devices. Raises: DeviceLostError if a rank got no answer from another."""
        for rank in self.collectives:
            if rank.failed.item():
                raise DeviceLostError(f"{rank.failed.device} gets no answer from another GPU")

    def _on(self, rank: int, call: Callable[[], T]) -> T:
        with torch.inference_mode(), torch.cuda.stream(self.streams[rank]):
            return call()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make every rank's stream current on its device, and the first rank's device the current device."""
        with ExitStack() as stack:
            for stream in reversed(self.streams):
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def synchronize(self) -> None:
        """Wait for the streams of all ranks."""
        for stream in self.streams:
            stream.synchronize()

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=True)


def keep_pinned_memory(ranks: int) -> None:
    """Make torch cache pinned memory for uploads of all sizes, because pinning while serving may wait for the devices.

    Torch caches blocks whose sizes are powers of two. A step makes a few uploads for each rank (rows, pages,
    parameters, shared runs), and two steps may be in flight. Only steps with prompts make larger uploads, one each.
    """
    blocks = [
        torch.empty(1 << power, dtype=torch.uint8, pin_memory=True)
        for power in range(2, 23)
        for _ in range((12 if power <= 16 else 4 if power <= 20 else 2) * ranks)
    ]
    del blocks


def keep_small_memory(device: torch.device) -> None:
    """Make torch cache device memory for small tensors. Torch keeps them in separate segments."""
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(32)]
    del blocks
