"""Steps in flight, and functions that apply their results to sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, repeat
from typing import TypeVar

import msgspec

from aengine.scheduling.batch import Counters
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.step_plan import PrefillChunk, StepPlan, StepResult

T = TypeVar("T")
End = Callable[[Sequence], None]  # ends a sequence: `Transitions.end`
Observe = Callable[[Sequence, int, int], None]  # `Drafting.observe`


class Flight(msgspec.Struct, eq=False):
    """A plan that was launched and is neither committed nor failed, and its sequences in the plan's order."""

    plan: StepPlan
    decode: list[Sequence] = []
    prefill: list[tuple[Sequence, PrefillChunk, list[Sequence]]] = []  # sequence, chunk, forks

    def draws(self) -> list[Sequence]:
        """Return the sequences that draw, in the order of the results."""
        drawing = list(self.decode)
        for sequence, chunk, forks in self.prefill:
            if chunk.samples:
                drawing.append(sequence)
                drawing.extend(forks)
        return drawing

    def drawn(self) -> list[int]:
        """Return how many tokens each sequence of `draws` draws: its drafts and one more."""
        of_decodes = [1 + drafts for drafts in self.plan.drafts] or [1] * len(self.decode)
        return of_decodes + [1] * (len(self.draws()) - len(self.decode))

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
                    updates.append(Update(holder, (), None, "stop"))
                    end(holder)
            else:
                updates.append(_end_not_finite(holder, end))
    return updates


def commit_computed(flight: Flight, result: StepResult, counters: Counters, observe: Observe) -> None:
    """Count the tokens of decodes whose keys and values are now known. Take back the drafts that were refused.

    observe: called with each sequence that verified drafts, their number, and how many were accepted.
    """
    if not result.counts:
        for sequence in flight.decode:
            if sequence.phase is not Phase.FINISHED:
                sequence.computed += 1
        return
    for sequence, drafts, count, is_finite in zip(flight.decode, flight.plan.drafts, result.counts, result.finite):
        refused = 1 + drafts - count
        sequence.launched -= refused
        sequence.pending -= refused
        if sequence.phase is not Phase.FINISHED:
            sequence.computed += count
            if drafts and is_finite:
                counters.count_verified(drafts, count - 1)
                observe(sequence, drafts, count - 1)


def commit_draws(flight: Flight, result: StepResult, counters: Counters, end: End) -> list[Update]:
    """Append the drawn tokens to the outputs. End sequences that drew a stop token or have reached their length.

    `commit_computed` comes before. Returns an update for each sequence that has new tokens or ends.
    """
    updates: list[Update] = []
    draws, generated = flight.draws(), 0
    if result.proposed:
        for sequence, draft_ids in zip(draws, result.proposed):
            if sequence.grammar is not None:
                sequence.draft_ids = draft_ids
    rows = _by_row(result.token_ids, result.counts)
    logprobs = _by_row(result.logprobs, result.counts) if result.logprobs else repeat(None)
    for sequence, token_ids, finite, scores in zip(draws, rows, result.finite, logprobs):
        count = len(token_ids)
        sequence.pending -= count
        if sequence.phase is Phase.FINISHED:
            continue  # it ended while this step was in flight: its tokens are dropped
        if not finite:
            updates.append(_end_not_finite(sequence, end))
            continue
        update = Update(sequence, token_ids, scores, None)
        updates.append(update)
        output = sequence.output
        ends = len(output) + count >= sequence.max_output or not sequence.stops.isdisjoint(token_ids)
        if ends:
            _cut_at_the_end(update)
            token_ids = update.token_ids
        output.extend(token_ids)
        if sequence.grammar is not None:
            for token_id in token_ids:
                sequence.grammar.accept(token_id)
        if ends:
            sequence.cut(len(output))
            end(sequence)
        generated += len(token_ids)
    counters.generated_tokens += generated
    return updates


def _cut_at_the_end(update: Update) -> None:
    """Remove the tokens after the one that ends the sequence, and note the reason."""
    sequence, token_ids = update.sequence, update.token_ids
    room = sequence.max_output - len(sequence.output)
    stop = next((place for place, token_id in enumerate(token_ids) if token_id in sequence.stops), room)
    update.finish_reason = "stop" if stop < room else "length"
    update.token_ids = token_ids[: min(stop + 1, room)]


def _by_row(values: list[T], counts: Seq[int]) -> list[tuple[T, ...]]:
    """Split a step's results of single tokens into tuples, one for each row. counts: as in `StepResult`."""
    if not counts:
        return [(value,) for value in values]
    return [tuple(values[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]


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
    return Update(sequence, (), None, "error", finite=False)
