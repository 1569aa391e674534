"""The rows of the batch, and the transitions of sequences between queue, row and end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aengine.latency import STEP_TOKEN_BOUNDS, Histogram
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.queue import Queue
from aengine.scheduling.sequence import Phase, Sequence


@dataclass(slots=True)
class Counters:
    """The scheduler's totals since start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0  # cached tokens that were loaded from host memory
    cached_disk_tokens: int = 0  # cached tokens that were loaded from a disk
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKEN_BOUNDS))  # computed in a step
    generated_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0  # drafts that steps verified
    accepted: int = 0  # drafts that equal the tokens drawn at their positions
    verified: int = 0  # rows with drafts, over all steps
    accepted_by_position: list[int] = field(default_factory=list)  # [i]: how many rows accepted their draft i

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that went through the model."""
        return int(self.step_tokens.total)

    def count_verified(self, drafted: int, accepted: int) -> None:
        """Count one row of a step that verified drafts. accepted: how many of them, from the first one on."""
        self.drafted += drafted
        self.accepted += accepted
        self.verified += 1
        by_position = self.accepted_by_position
        by_position.extend([0] * (drafted - len(by_position)))
        for position in range(accepted):
            by_position[position] += 1


class Batch:
    """The rows of the batch, and the sequences that hold them.

    `running` holds the RUNNING sequences in order of rank. A sequence that leaves keeps its row and its pages until its
    last step lands; `promised` counts the pages that become available then.
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

    def enter(self, sequence: Sequence) -> None:
        """Put a sequence on a free row."""
        sequence.phase = Phase.RUNNING
        sequence.row = self.free_rows.pop()
        self.structured += sequence.grammar is not None
        if sequence.adapter is not None:
            sequence.adapter.take_row()
        index = len(self.running)  # search from the end: a new sequence nearly always ranks last
        key = (*sequence.rank, sequence.index)
        while index and (*self.running[index - 1].rank, self.running[index - 1].index) > key:
            index -= 1
        self.running.insert(index, sequence)

    def leave(self, sequence: Sequence, phase: Phase) -> bool:
        """Move a running sequence into `phase`. Returns whether it has left its row.

        If a step in flight names it, it leaves its row when that step lands.
        """
        self.running.remove(sequence)
        sequence.phase = phase
        if not sequence.in_flight:
            self._vacate(sequence)
            return True
        sequence.promised = self._memory.returnable(sequence)
        self.promised += sequence.promised
        return False

    def vacate_promised(self, sequence: Sequence) -> None:
        """Free the row and memory of a sequence that left the batch while steps in flight named it."""
        self.promised -= sequence.promised
        sequence.promised = 0
        self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        self.free_rows.append(sequence.row)
        self.structured -= sequence.grammar is not None
        if sequence.adapter is not None:
            sequence.adapter.free_row()
        sequence.row = -1
        sequence.launched = sequence.computed = sequence.proposed = 0
        sequence.decoding = sequence.has_gap = False


class Transitions:
    """Moves sequences from one phase to the next: out of the batch, back to the queue, or to their end.

    Choices that have not forked yet are only counted: `unforked` is their number over all sequences, and
    `Sequence.siblings` their number for one.
    """

    def __init__(self, waiting: Queue, batch: Batch, counters: Counters) -> None:
        self.waiting = waiting
        self.batch = batch
        self.counters = counters
        self.unforked = 0

    def land(self, sequences: Iterable[Sequence]) -> None:
        """Note that a step that named these sequences was committed or has failed."""
        for sequence in sequences:
            sequence.in_flight -= 1
            if sequence.in_flight or sequence.phase is Phase.RUNNING or sequence.row < 0:
                continue
            self.batch.vacate_promised(sequence)
            self._requeue(sequence)

    def leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a RUNNING sequence out of the batch, at once or when its last step in flight lands."""
        if self.batch.leave(sequence, phase):
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence back into the queue, after it has freed its row and memory."""
        if sequence.phase is Phase.PREEMPTED:
            sequence.phase = Phase.WAITING
            sequence.tiers_searched = False
            self.waiting.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue. Its memory is free when its last step in flight lands."""
        self.counters.preemptions += 1
        self.leave(sequence, Phase.PREEMPTED)

    def end(self, sequence: Sequence) -> None:
        """End a sequence in any phase, and the choices that have yet to fork from it. Idempotent."""
        match sequence.phase:
            case Phase.FINISHED:
                return
            case Phase.WAITING:
                self.waiting.remove(sequence)
                sequence.phase = Phase.FINISHED
            case Phase.PREEMPTED:
                sequence.phase = Phase.FINISHED
            case Phase.RUNNING:
                self.leave(sequence, Phase.FINISHED)
        self.unforked -= sequence.siblings
        sequence.siblings = 0
