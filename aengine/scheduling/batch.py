"""The rows of the batch and the sequences on them: those that run, and those that leave once no step in flight names
them.
"""

from __future__ import annotations

from aengine.scheduling.holdings.memory import SequenceMemory
from aengine.scheduling.sequence import Phase, Sequence
from aengine.step_plan import NewRow


class Batch:
    """The rows of the batch, and the sequences that hold them.

    `running` holds the sequences that run, by rank, and nobody else. A sequence that leaves keeps its row and its pages
    until its last step lands; `promised` counts the pages that will come back then.
    """

    def __init__(self, max_rows: int, memory: SequenceMemory) -> None:
        self.max_rows = max_rows
        self.running: list[Sequence] = []
        self.promised = 0
        self.structured = 0  # rows whose sequence has a grammar
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self._memory = memory

    @property
    def held(self) -> int:
        """The number of rows that are taken."""
        return self.max_rows - len(self.free_rows)

    def enter(self, sequence: Sequence, leader: Sequence | None = None) -> NewRow:
        """Put a sequence, which has its pages, on a free row; as a copy of its leader's if it forks from one."""
        sequence.phase = Phase.RUNNING
        sequence.row = self.free_rows.pop()
        self.structured += sequence.grammar is not None
        adapter = sequence.adapter
        place = len(self.running)  # newcomers nearly always rank last
        key = (*sequence.rank, sequence.index)
        while place and (*self.running[place - 1].rank, self.running[place - 1].index) > key:
            place -= 1
        self.running.insert(place, sequence)
        return NewRow(
            row=sequence.row,
            params=sequence.params,
            seed=sequence.seed,
            stop_ids=sequence.stop_ids,
            prompt_len=sequence.prompt_len,
            tokens=sequence.ids(0, sequence.length) if leader is None else sequence.prompt,
            length=sequence.launched,
            pages=list(sequence.pages) if leader is None else [],
            banned=sequence.banned,
            copy_of=None if leader is None else leader.row,
            adapter=0 if adapter is None else adapter.take_row(),
            near=sequence.near,
            window_pages=[0] * sequence.window_first + sequence.window_pages,
        )

    def leave(self, sequence: Sequence, phase: Phase) -> bool:
        """Take a sequence out of the running ones, into `phase`. Whether it is gone at once, and not only when its last
        step lands.
        """
        self.running.remove(sequence)
        sequence.phase = phase
        if not sequence.in_flight:
            self._vacate(sequence)
            return True
        sequence.promised = self._memory.returnable(sequence)
        self.promised += sequence.promised
        return False

    def land(self, sequence: Sequence) -> bool:
        """Count down the steps in flight that name the sequence. Whether that was the last thing that kept it."""
        sequence.in_flight -= 1
        if sequence.in_flight or sequence.phase is Phase.RUNNING or sequence.row < 0:
            return False
        self.promised -= sequence.promised
        sequence.promised = 0
        self._vacate(sequence)
        return True

    def _vacate(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        self.free_rows.append(sequence.row)
        self.structured -= sequence.grammar is not None
        if sequence.adapter is not None:
            sequence.adapter.free_row()
        sequence.row = -1
        sequence.launched = sequence.computed = 0
        sequence.decoding = False
