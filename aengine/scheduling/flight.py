"""Steps in flight, and functions that apply their results to sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from aengine.scheduling.batch import Counters
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.step_plan import PrefillChunk, StepPlan, StepResult

End = Callable[[Sequence], None]  # ends a sequence: `Transitions.end`


@dataclass(slots=True)
class Flight:
    """A plan that was launched and is neither committed nor failed, and its sequences in the plan's order."""

    plan: StepPlan
    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, PrefillChunk, list[Sequence]]] = field(default_factory=list)  # sequence, chunk, forks

    def draws(self) -> list[Sequence]:
        """Return the sequences that draw, in the order of the results."""
        drawing = list(self.decode)
        for sequence, chunk, forks in self.prefill:
            if chunk.samples:
                drawing.append(sequence)
                drawing.extend(forks)
        return drawing

    def pooling(self) -> list[Sequence]:
        """Return the sequences whose last chunk is pooled, in the order of the chunks."""
        return [sequence for sequence, chunk, _ in self.prefill if sequence.pool is not None and _ends(sequence, chunk)]

    def carried(self) -> list[Sequence]:
        """Return every sequence whose row or pages the step names."""
        named = list(self.decode)
        for sequence, _, forks in self.prefill:
            named.append(sequence)
            named.extend(forks)
        return named


def commit_chunks(flight: Flight, result: StepResult, end: End) -> list[Update]:
    """Apply the results of prefill chunks. End sequences whose chunk is not finite, and finished pooled prompts."""
    updates: list[Update] = []
    scores = iter(result.scores)
    finite = iter(result.finite_chunks or [True] * len(flight.prefill))
    pooled = iter(result.pooled)
    for sequence, chunk, forks in flight.prefill:
        if chunk.score_ids:  # a preempted prompt starts again, and overwrites the same scores
            sequence.scores[chunk.start : chunk.start + len(chunk.score_ids)] = next(scores)
        is_finite = next(finite)
        if chunk.pool is not None:
            is_finite &= _note_pooled(sequence, chunk, next(pooled))
        if not is_finite and sequence.admitted is not None:
            sequence.admitted.finite = False  # also for choices that fork from it in the next step
        for holder in (sequence, *forks):
            if holder.phase is Phase.FINISHED:
                continue
            if is_finite:
                holder.computed = chunk.start + len(chunk.token_ids)
                if chunk.pool is not None and _ends(holder, chunk):
                    updates.append(Update(holder, -1, None, "stop"))
                    end(holder)
            else:
                updates.append(_end_not_finite(holder, end))
    return updates


def commit_draws(flight: Flight, result: StepResult, counters: Counters, end: End) -> list[Update]:
    """Append the drawn tokens to the outputs. End sequences that drew a stop token or have reached their length."""
    updates: list[Update] = []
    logprobs = result.logprobs
    for i, sequence in enumerate(flight.draws()):
        sequence.pending -= 1
        if sequence.phase is Phase.FINISHED:
            continue  # it ended while this step was in flight: its token is dropped
        if not result.finite[i]:
            updates.append(_end_not_finite(sequence, end))
            continue
        token_id = result.token_ids[i]
        sequence.output.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        counters.generated_tokens += 1
        update = Update(sequence, token_id, logprobs[i] if logprobs else None, None)
        if token_id in sequence.stops:
            update.finish_reason = "stop"
            end(sequence)
        elif len(sequence.output) >= sequence.max_output:
            update.finish_reason = "length"
            end(sequence)
        updates.append(update)
    return updates


def _ends(sequence: Sequence, chunk: PrefillChunk) -> bool:
    """Return whether a chunk of a pooled prompt is its last one."""
    return chunk.start + len(chunk.token_ids) == sequence.prompt_len


def _note_pooled(sequence: Sequence, chunk: PrefillChunk, vector: array[float] | None) -> bool:
    """Keep a chunk's pooled vector. Returns whether it is finite."""
    if _ends(sequence, chunk):
        sequence.pending -= 1
    if vector is None:
        return False
    if not chunk.start:  # the first chunk; a preempted prompt starts again with it
        sequence.pooled.clear()
    sequence.pooled.append(vector)
    return True


def _end_not_finite(sequence: Sequence, end: End) -> Update:
    sequence.cacheable = False
    end(sequence)
    return Update(sequence, -1, None, "error", finite=False)
