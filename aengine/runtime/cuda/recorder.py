"""Which graphs are recorded when: those that every step can be padded to before anything is served, the others later.

Recording holds the interpreter for 10 to 20 ms a graph, 1.9 s for all of an 8B model's. A sixth of them are enough to
begin with. The others are recorded one by one while nothing runs, or, where steps never pause, as these miss them.
All that they launch was rehearsed before: nothing is compiled, and the memory that they take was set aside.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from tqdm import tqdm

from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.prefill_graphs import PrefillGraphs
from aengine.runtime.cuda.ranks import DeviceRanks
from aengine.runtime.cuda.recording import GraphPart, give_back
from aengine.runtime.cuda.runner import GraphedExecutor

log = logging.getLogger("aengine")

Graphs = PrefillGraphs | DecodeGraphs


class Recorder:
    """Records the graphs of all ranks, part by part, in one order."""

    def __init__(self, ranks: Sequence[GraphedExecutor], devices: DeviceRanks) -> None:
        self._devices = devices
        self._left = deque(zip(*(graph_parts(rank) for rank in ranks), strict=True))

    def rehearse(self) -> None:
        """Launch everything once, so that all is compiled and loaded. Waits."""
        for part in self._left:
            self._devices([partial(graphs.rehearse, which) for graphs, which in part])
            self._devices.synchronize()
        give_back()  # before graphs have memory of their own

    def record(self, progress: bool = False, least: bool = False) -> None:
        """Record all that is left, of rehearsed graphs. least: only what every step can be padded to."""
        todo, later = list(self._left), []
        if least:
            kept = {id(graphs): covering(graphs.sizes) for graphs, _ in (part[0] for part in todo)}
            later = [part for part in todo if part[0][1].shared or part[0][1].size not in kept[id(part[0][0])]]
            todo = [part for part in todo if part not in later]
        hidden = None if progress else True  # None: unless stderr is a terminal
        for part in tqdm(todo, "capturing graphs", unit="graph", delay=2, disable=hidden, leave=False):
            self._record(part)
        self._left = deque(later)
        give_back()

    @property
    def left(self) -> int:
        """Parts that are not recorded yet."""
        return len(self._left)

    def record_next(self, missed: bool = False) -> bool:
        """Record one more, if any is left: the one that the newest step has missed, or, unless `missed`, any.

        For the thread that launches steps. Leaves alone what steps that are on their way read and write, and waits for
        nothing, unless the device has no memory for it but what steps left behind. Where it fails, the others go
        unrecorded.
        """
        part = next((part for part in self._left if part[0][0].missed == part[0][1]), None)
        if part is None and not missed and self._left:
            part = self._left[0]
        if part is None:
            return False
        self._left.remove(part)
        try:
            try:
                self._rehearse_and_record(part)
                return True
            except torch.OutOfMemoryError as error:
                log.debug("once more, without what steps left behind: %s", error)
            give_back()  # as torch does by itself, but not while it records; the error has let go of its frames
            self._rehearse_and_record(part)
        except Exception as error:  # noqa: BLE001 - steps are padded to what is recorded
            log.warning("%d graphs are left out, and steps padded to larger ones: %s", len(self._left) + 1, error)
            self._left.clear()
        return True

    def close(self) -> None:
        """Record nothing more, and let go of all that graphs hold."""
        self._left.clear()

    def _rehearse_and_record(self, part: Sequence[tuple[Graphs, GraphPart]]) -> None:
        # In this thread libraries may not have been used yet.
        self._devices([partial(graphs.rehearse, which) for graphs, which in part], short=True)
        self._record(part)

    def _record(self, part: Sequence[tuple[Graphs, GraphPart]]) -> None:
        self._devices([partial(graphs.record, which) for graphs, which in part], short=True)


def graph_parts(executor: GraphedExecutor) -> list[tuple[Graphs, GraphPart]]:
    """All that an executor's graphs consist of, in the order in which it is recorded."""
    both = (executor.prefill_graphs, executor.decode_graphs)
    return [(graphs, part) for graphs in both if graphs is not None for part in graphs.parts]


def covering(sizes: Sequence[int]) -> set[int]:
    """Of ascending sizes the largest, and as few of the others as have each at most half as much room as the next."""
    kept = [sizes[-1]]
    for size in reversed(sizes):
        if 2 * size <= kept[-1]:
            kept.append(size)
    return {*kept, sizes[0]}
