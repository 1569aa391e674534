"""Checks of the scheduler's invariants: rows, pages and promises. For tests and diagnosis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq

from aengine.scheduling.batch import Batch
from aengine.scheduling.flight import Flight
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.sequence import AdmittedPages, Phase, Sequence


def check_batch(batch: Batch, leaving: Collection[Sequence]) -> None:
    """Check that every row is free or held by one sequence, that counts are right, and that `running` is by rank."""
    holders = [*batch.running, *leaving]
    rows = [*(sequence.row for sequence in holders), *batch.free_rows]
    _require(sorted(rows) == list(range(batch.max_rows)), f"rows are shared or lost: {rows}")
    for sequence in batch.running:
        _require(sequence.phase is Phase.RUNNING, f"a {sequence.phase.value} sequence runs")
    ranks = [(*sequence.rank, sequence.index) for sequence in batch.running]
    _require(ranks == sorted(ranks), "the running sequences are out of order")
    promised = sum(sequence.promised for sequence in leaving)
    _require(batch.promised == promised, f"{promised} pages are promised, not {batch.promised}")
    structured = sum(sequence.grammar is not None for sequence in holders)
    _require(batch.structured == structured, f"{structured} rows have a grammar, not {batch.structured}")


def check_flights(running: Seq[Sequence], leaving: Collection[Sequence], flights: Collection[Flight]) -> None:
    """Check each sequence's counts of the steps that name it and of its draws in flight."""
    named = Counter(sequence for flight in flights for sequence in flight.carried())
    drawing = Counter(sequence for flight in flights for sequence in flight.pooling())
    for flight in flights:
        for sequence, drawn in zip(flight.draws(), flight.drawn(), strict=True):
            drawing[sequence] += drawn
    for sequence in {*running, *leaving, *named}:
        _require(sequence.row >= 0, "a step in flight names a sequence without a row")
        _require(sequence.in_flight == named[sequence], f"{named[sequence]} steps name it, not {sequence.in_flight}")
        _require(
            sequence.pending == drawing[sequence], f"{drawing[sequence]} draws are in flight, not {sequence.pending}"
        )
    for sequence in running:
        _require(sequence.launched < sequence.max_total, "a token beyond the last one was launched")
        ahead = sequence.length + sequence.pending - sequence.launched
        _require(ahead == 1 if sequence.decoding else ahead > 0, f"{ahead} tokens are yet to go through the model")


def check_pages(memory: SequenceMemory, holders: Collection[Sequence], loading: Seq[int]) -> None:
    """Check that every held page belongs to a sequence or the tree, and that pages cover the computed tokens.

    loading: pages that are being loaded from a lower tier.
    """
    memory.allocator.check_integrity()
    memory.tree.check_integrity()
    admissions: Counter[AdmittedPages] = Counter()
    private = list(loading)
    for sequence in holders:
        admitted = sequence.admitted
        if admitted is None:
            raise AssertionError("scheduler: a sequence on a row has no pages")
        admissions[admitted] += 1
        private += sequence.grown
        _require(
            set(sequence.pages[admitted.pages :]) == sequence.grown,
            "the pages after the admitted ones differ from those it has grown",
        )
        _require(len(set(sequence.pages)) == len(sequence.pages), "a page is twice in one table")
        _require(sequence.computed <= sequence.launched, "more is computed than was launched")
        _require(sequence.launched <= len(sequence.pages) * memory.page_size, "tokens without a page were launched")
        together = sequence.pages[: admitted.pages]
        _require(admitted.private <= set(together), "admitted pages hold pages that are not in the table")
        for page in together[admitted.node.depth :]:
            _require(page in admitted.private, f"page {page} is neither private nor locked")
    for admitted, count in admissions.items():
        private += admitted.private
        _require(admitted.holders == count, f"{count} sequences hold admitted pages, not {admitted.holders}")
    _require(len(set(private)) == len(private), "two sequences own a page")
    held = sum(memory.allocator.held(page) for page in range(memory.usable_pages + 1))
    owned = len(private) + memory.tree.cached_pages
    _require(held == owned, f"{held} pages are held, {owned} of them have an owner")


def check_unforked(unforked: int, alive: Collection[Sequence]) -> None:
    """Check that `unforked` is the number of choices that sequences have yet to fork."""
    waiting = sum(sequence.siblings for sequence in alive)
    _require(unforked == waiting, f"{waiting} choices are still to be made, not {unforked}")
    for sequence in alive:
        _require(not (sequence.siblings and sequence.decoding), "a sequence that decodes should have forked")


def check_idle(memory: SequenceMemory) -> None:
    """Check that every page is free or cached, and no cached page is locked."""
    free, cached = memory.allocator.free, memory.tree.cached_pages
    _require(free + cached == memory.usable_pages, f"{free} free + {cached} cached pages of {memory.usable_pages}")
    _require(memory.tree.evictable_pages == cached, "a cached page is still locked at idle")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"scheduler: {message}")
