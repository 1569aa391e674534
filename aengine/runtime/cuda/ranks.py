"""The GPUs of one model: each call is enqueued on the device and the stream of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from aengine.errors import DeviceLostError
from aengine.kernels.collective.peers import PeerCollective, begin_anew

T = TypeVar("T")


class DeviceRanks:
    """`Together` on several GPUs. Kernels of one wait for those of the others on the device.

    A few launches go out from the caller's thread, rank by rank. All others go out from a thread for each rank, which
    lets go of the interpreter where it is held up: hundreds of launches may fill the queue of a device whose first
    kernels wait for another's, and a kernel that is used for the first time is loaded once its device is at rest.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], collectives: Sequence[PeerCollective] = ()) -> None:
        """streams: of each rank, on its device; collectives: of each rank, none where there is one."""
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
            while futures:  # no frame of an error keeps the future that has it: a cycle, with the step's memory
                results.append(futures.pop(0).result())
            return results
        except BaseException:
            if self.collectives:  # some ranks have launched what the others never will
                self.wait_for_each_other(self._patience)
            raise

    def wait_for_each_other(self, patience: float) -> None:
        """From now on kernels wait so many seconds for those of the other ranks; 0: not at all, so that ranks can be
        rehearsed whose kernels are compiled and loaded as they come. Waits for the devices.
        """
        self._patience = patience
        begin_anew(self.collectives, patience)

    def check_answers(self) -> None:
        """Raise `DeviceLostError` where a rank has waited for another in vain. Waits for the devices."""
        for rank in self.collectives:
            if rank.failed.item():
                raise DeviceLostError(f"{rank.failed.device} gets no answer from another GPU")

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


def keep_pinned_memory(ranks: int) -> None:
    """Let torch keep host memory of all sizes that uploads have: taking more of it may wait for the devices.

    Torch keeps it by powers of two, from a single cell on, and a step uploads a few times for each rank (rows, pages,
    parameters, shared runs), two steps of which may be on the way. What is larger comes with prompts, once a step.
    """
    blocks = [
        torch.empty(1 << power, dtype=torch.uint8, pin_memory=True)
        for power in range(2, 23)
        for _ in range((12 if power <= 16 else 4 if power <= 20 else 2) * ranks)
    ]
    del blocks


def keep_small_memory(device: torch.device) -> None:
    """Let torch keep so much of a device's memory for small tensors, which come from segments of their own."""
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(32)]
    del blocks
