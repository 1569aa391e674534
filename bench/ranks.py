"""GPUs that work together, and CUDA graphs of theirs that one thread launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.collective.peers import PeerCollective, connect, reset_collectives

CALLS = 72  # of a graph
PATIENCE = 5.0  # seconds
Call = Callable[[int, int], object]  # (rank, number of the call)


@dataclass(frozen=True)
class Ranks:
    """GPUs that work together, each with a stream of its own."""

    collectives: list[PeerCollective]
    devices: list[torch.device]
    streams: list[torch.cuda.Stream]

    @classmethod
    def connect(cls, count: int) -> Ranks:
        devices = [torch.device("cuda", i) for i in range(count)]
        return cls(connect(devices, PATIENCE), devices, [torch.cuda.Stream(device) for device in devices])

    def each(self, function: Callable[[int], object]) -> None:
        for rank, device in enumerate(self.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.streams[rank]):
                function(rank)

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def rehearse(self, function: Callable[[int], object]) -> None:
        """Load every kernel while ranks do not wait for each other."""
        reset_collectives(self.collectives, patience=0.0)
        self.each(function)
        reset_collectives(self.collectives, PATIENCE)

    def capture(self, call: Call, calls: int = CALLS) -> list[torch.cuda.CUDAGraph]:
        """A graph of each rank."""
        self.rehearse(lambda rank: [call(rank, i) for i in range(min(calls, 4))])
        graphs = [torch.cuda.CUDAGraph() for _ in self.devices]
        for rank, graph in enumerate(graphs):
            with (
                torch.cuda.device(self.devices[rank]),
                torch.cuda.graph(graph, stream=self.streams[rank], capture_error_mode="thread_local"),
            ):
                for i in range(calls):
                    call(rank, i)
        return graphs

    def time(self, call: Call, calls: int = CALLS) -> float:
        """Microseconds per call."""
        graphs = self.capture(call, calls)
        runs = 20

        def replay() -> None:
            self.each(lambda rank: graphs[rank].replay())

        for _ in range(3):
            replay()
        self.wait()
        started = time.perf_counter()
        for _ in range(runs):
            replay()
        self.wait()
        return (time.perf_counter() - started) / runs / calls * 1e6

    def failed(self) -> bool:
        return any(bool(one.failed.item()) for one in self.collectives)


def tensors(ranks: Ranks, *shape: int, same: bool = False, seed: int = 0) -> list[Tensor]:
    """bfloat16, one for each rank; same: of the same values."""
    made = []
    for rank, device in enumerate(ranks.devices):
        generator = torch.Generator(device).manual_seed(seed if same else 100 * seed + rank)
        made.append(torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16))
    return made
