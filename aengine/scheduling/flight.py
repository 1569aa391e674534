"""Steps in flight: launched, and neither committed nor failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from aengine.scheduling.sequence import Sequence
from aengine.step_plan import PrefillChunk, StepPlan


def ends(sequence: Sequence, chunk: PrefillChunk) -> bool:
    """Whether a chunk of a prompt that is pooled is its last one."""
    return chunk.start + len(chunk.token_ids) == sequence.prompt_len


@dataclass(slots=True)
class Flight:
    """A plan and the sequences that it carries, in the plan's order."""

    plan: StepPlan
    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, PrefillChunk, list[Sequence]]] = field(default_factory=list)  # with its forks

    def draws(self) -> list[Sequence]:
        """The sequences that draw, in the order of the results."""
        drawing = list(self.decode)
        for sequence, chunk, forks in self.prefill:
            if chunk.samples:
                drawing.append(sequence)
                drawing.extend(forks)
        return drawing

    def pooling(self) -> list[Sequence]:
        """The sequences whose last chunk is pooled, in the order of the chunks."""
        return [sequence for sequence, chunk, _ in self.prefill if sequence.pool is not None and ends(sequence, chunk)]

    def carried(self) -> list[Sequence]:
        """Every sequence whose row or pages the step names."""
        named = list(self.decode)
        for sequence, _, forks in self.prefill:
            named.append(sequence)
            named.extend(forks)
        return named
