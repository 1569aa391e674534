"""Results of a step applied to its sequences: what is computed, which tokens were drawn, which outputs have ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from aengine.scheduling.counters import Counters
from aengine.scheduling.flight import Flight, ends
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.step_plan import PrefillChunk, StepResult

End = Callable[[Sequence], None]  # takes a sequence out of the batch


def commit_chunks(flight: Flight, result: StepResult, end: End) -> list[Update]:
    """Note what prefill chunks computed; end those whose chunk is not finite, and prompts that are pooled."""
    updates: list[Update] = []
    scores = iter(result.scores)
    finite = iter(result.finite_chunks or [True] * len(flight.prefill))
    pooled = iter(result.pooled)
    for sequence, chunk, forks in flight.prefill:
        if chunk.score_ids:  # a resumed prompt starts anew, and says the same again
            sequence.scores[chunk.start : chunk.start + len(chunk.score_ids)] = next(scores)
        is_finite = next(finite)
        if chunk.pool is not None:
            is_finite &= _note_pooled(sequence, chunk, next(pooled))
        if not is_finite and sequence.admitted is not None:
            sequence.admitted.finite = False  # also for those who fork from it in the next step
        for holder in (sequence, *forks):
            if holder.phase is Phase.FINISHED:
                continue
            if is_finite:
                holder.computed = chunk.start + len(chunk.token_ids)
                if chunk.pool is not None and ends(holder, chunk):
                    updates.append(Update(holder, -1, None, "stop"))
                    end(holder)
            else:
                updates.append(_end_not_finite(holder, end))
    return updates


def commit_draws(flight: Flight, result: StepResult, counters: Counters, end: End) -> list[Update]:
    """Append what was drawn to the outputs; end those that a stop token or their length ends."""
    updates: list[Update] = []
    logprobs = result.logprobs
    for place, sequence in enumerate(flight.draws()):
        sequence.pending -= 1
        if sequence.phase is Phase.FINISHED:
            continue  # ended while this step was in flight: its token appears nowhere
        if not result.finite[place]:
            updates.append(_end_not_finite(sequence, end))
            continue
        token_id = result.token_ids[place]
        sequence.output.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        counters.generated_tokens += 1
        update = Update(sequence, token_id, logprobs[place] if logprobs else None, None)
        if token_id in sequence.stops:
            update.finish_reason = "stop"
            end(sequence)
        elif len(sequence.output) >= sequence.max_output:
            update.finish_reason = "length"
            end(sequence)
        updates.append(update)
    return updates


def _note_pooled(sequence: Sequence, chunk: PrefillChunk, vector: array[float] | None) -> bool:
    """Keep what was taken of a chunk. Whether it is finite."""
    if ends(sequence, chunk):
        sequence.pending -= 1
    if vector is None:
        return False
    if not chunk.start:  # the first one, or a prompt that was preempted and starts anew
        sequence.pooled.clear()
    sequence.pooled.append(vector)
    return True


def _end_not_finite(sequence: Sequence, end: End) -> Update:
    sequence.cacheable = False
    end(sequence)
    return Update(sequence, -1, None, "error", finite=False)
