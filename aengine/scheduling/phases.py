"""Takes sequences from one phase to the next: out of the batch, back to the queue, to their end."""

from __future__ import annotations

from aengine.scheduling.batch import Batch
from aengine.scheduling.counters import Counters
from aengine.scheduling.sequence import Phase, Sequence
from aengine.scheduling.waiting.adapter_queue import AdapterQueue
from aengine.scheduling.waiting.queue import WaitingQueue


class Phases:
    """The queue and the batch, and the ways between them.

    The choices of a request wait as a number, `unforked`, on the sequence that they will fork from.
    """

    def __init__(self, waiting: WaitingQueue | AdapterQueue, batch: Batch) -> None:
        self.waiting = waiting
        self.batch = batch
        self.counters = Counters()
        self.unforked = 0

    def land(self, sequence: Sequence) -> None:
        """Note that a step that named the sequence is over."""
        if self.batch.land(sequence):
            self._requeue(sequence)

    def leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a RUNNING sequence out of the batch, at once or when its last step in flight lands."""
        if self.batch.leave(sequence, phase):
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Return a preempted sequence that has given everything back to its place in the queue."""
        if sequence.phase is Phase.PREEMPTED:
            sequence.phase = Phase.WAITING
            sequence.sought = False
            self.waiting.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; what it holds comes back when its last step in flight lands."""
        self.counters.preemptions += 1
        self.leave(sequence, Phase.PREEMPTED)

    def end(self, sequence: Sequence) -> None:
        """End a sequence in whatever phase it is, and the choices that have yet to fork from it; once is enough."""
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
        self.counters.ended += 1
        self.unforked -= sequence.siblings
        sequence.siblings = 0
