"""A device without a model: it runs step plans exactly and checks every page that they read or write.

Instead of K and V of a token, this device keeps the identity of the whole prefix that ends in the token. A forward pass
gathers the row's pages and compares them with the prefix that the row should have. So a page that is stale, misaligned,
shared by mistake, or not written yet is found by the step that reads it.

The "model" is a hash: a draw depends only on the full prefix and on the row's seed. The pooled vector of a chunk is its
begin, its end, and the prefix that ends there. The upper half of a seed is the tenant (`cache_salt`): two tenants never
share a prefix. Nor do two adapters, or two loadings of one: every prefix that a step computes includes the adapter that
is in the row's place when the step runs.

A row with drafts writes all of them to its pages. Slots of refused drafts are marked: only the row that wrote them may
write there again, and no row may read them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import RadixTree
from aengine.scheduling.addons.windows import SequenceWindows
from aengine.scheduling.scheduler import Scheduler
from aengine.step_plan import NewRow, PrefillChunk, StepPlan, StepResult
from tests.scheduling.fake_drafts import REFUSED, FakeDrafts
from tests.scheduling.fake_model import Prefixes, draw, root
from tests.scheduling.fake_states import FakeStates
from tests.scheduling.fake_tree import TreeChecker
from tests.scheduling.fake_windows import FakeWindows

POISON = -1  # a slot that was not written since its page was handed out
BROKEN = -2  # a slot written by a row with values that are not finite, or by a step that failed


@dataclass
class Row:
    """The device's state of one row."""

    seed: int
    pages: list[int]
    length: int  # tokens whose K and V are in the pages
    era: int  # number of cache flushes before it entered
    path: list[int]  # the prefix that ends in each known token, including the last draw, which is not yet fed
    place: int  # of its adapter; 0: none
    adapter: int  # the adapter in that place when it entered
    broken: bool = False  # its values are not finite; its reads and draws are not checked


@dataclass
class Launch:
    """A step on the device's queue. It names rows and pages until its result is fetched."""

    plan: StepPlan
    rows: set[int]
    pages: dict[int, int]  # page -> number of times it had been freed when the step was launched
    era: int
    places: set[int]  # of adapters
    failed_after: list[StepPlan] = field(default_factory=list)  # failed successors, which leave garbage


class WatchedAllocator(PageAllocator):
    """Reports freed pages to the device."""

    def __init__(self, num_pages: int, device: FakeDevice) -> None:
        super().__init__(num_pages)
        self._device = device

    def release(self, page: int) -> None:
        super().release(page)
        self._device.page_freed(page)


class FakeDevice:
    """Runs steps, and reads their plans, as late as possible: at `result`.

    Memory that is freed too early is gone then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_pages: int,
        page_size: int,
        vocab: int = 50,
        accepts: Seq[int] = (0,),
        drafts: bool = False,
    ) -> None:
        """accepts: as in `FakeDrafts`. drafts: whether rows verify drafts."""
        self.vocab = vocab
        self.page_size = page_size
        self.num_pages = num_pages
        self.prefixes = Prefixes()
        self.rows: dict[int, Row] = {}  # as of the last step that ran
        self.slots = [POISON] * (num_pages * page_size)
        self.eras = [0] * (num_pages * page_size)  # era of the row that wrote each slot
        self.era = 0
        self.times_freed = [0] * num_pages
        self.queue: deque[Launch] = deque()
        self.tokens = 0  # number of tokens computed
        self.tables: dict[int, list[int]] = {}  # page tables of rows, as of the last step launched
        # Lengths of rows, as of the last step launched. Drafts in flight count as if all of them were accepted.
        self.lengths: dict[int, int] = {}
        self.drafts = FakeDrafts(accepts)
        self.refused: dict[int, Row] = {}  # slot -> the row whose refused draft was written there last
        self.places: dict[int, int] = {0: 0}  # place -> generation of the adapter in it
        self.adapters: dict[int, int] = {}  # row -> place of its adapter, as of the last step launched
        self.lost: set[int] = set()  # rows with unknown state, because a step that named them failed
        self.allocator = WatchedAllocator(num_pages, self)
        scheduler.memory.allocator = self.allocator
        scheduler.memory.tree = RadixTree(self.allocator, page_size)
        self.states: FakeStates | None = None
        scheduler.memory.tree.watchers += [holding.watcher for holding in scheduler.memory.holdings]
        scheduler.memory.tree.watchers.append(TreeChecker(self.slots, self.prefixes, page_size))
        self.windows: FakeWindows | None = None
        for holding in scheduler.memory.holdings:
            if isinstance(holding, SequenceWindows):
                self.windows = FakeWindows(holding.pages, page_size)
            else:
                self.states = FakeStates(drafts)

    # ---- the scheduler's side -----------------------------------------------------------------------------

    def page_freed(self, page: int) -> None:
        for launch in self.queue:
            check(page not in launch.pages, f"page {page} is freed while step {launch.plan.step} in flight names it")
        self.times_freed[page] += 1
        self.slots[page * self.page_size : (page + 1) * self.page_size] = [POISON] * self.page_size

    def overwrite(self, place: int, adapter: int) -> None:
        """Put an adapter into a place. POISON: it is being copied."""
        for launch in self.queue:
            check(place not in launch.places, f"place {place} is written while step {launch.plan.step} names it")
        self.places[place] = adapter

    def flush(self) -> None:
        """Note a cache flush: rows that enter from now on must not read older pages."""
        self.era += 1

    def fill(self, page: int, token_ids: Seq[int]) -> None:
        """Write a page that begins a prompt, as if a step had computed it."""
        self.slots[page * self.page_size : (page + 1) * self.page_size] = self.prefixes.path(root(0, 0), token_ids)

    # ---- the runtime's side -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Put a step on the queue."""
        forks = [row for chunk in plan.prefill for row in chunk.forks]
        named = [*plan.decode, *(chunk.row for chunk in plan.prefill), *forks]
        check(len(named) == len(set(named)), f"a row is named twice in {named}")
        check(len(named) > 0, "an empty plan")
        for new in plan.new_rows:
            check(new.row in named, f"row {new.row} is new in a step that does not run it")
            for launch in self.queue:
                check(new.row not in launch.rows, f"row {new.row} is reused while step {launch.plan.step} names it")
            self.tables[new.row] = self._pages(new, self.tables)
            self.lengths[new.row] = new.length
            self.adapters[new.row] = new.adapter
            check(self.places.get(new.adapter, POISON) != POISON, f"row {new.row} names an adapter that is not there")
            self.lost.discard(new.row)
        check(not self.lost.intersection(named), f"rows {named} go on after a step of theirs failed: {self.lost}")
        for row, index, page in plan.new_pages:
            check(index == len(self.tables[row]), f"page {index} of row {row} follows {len(self.tables[row])} pages")
            self.tables[row].append(page)
        pages = {page for row in named for page in self.tables[row]}
        check(0 not in pages, "page 0 was handed out")
        for page in pages:
            check(self.allocator.held(page), f"page {page} is named, but free")
        for row in named:
            check(len(set(self.tables[row])) == len(self.tables[row]), f"row {row} names a page twice")
        drafts = self.drafts.launch(plan)
        contexts = list(plan.contexts) or [self.lengths[row] + 1 for row in plan.decode]
        for row, count, context in zip(plan.decode, drafts, contexts, strict=True):
            check(context > count, f"row {row} has {count} drafts in a context of {context}")
            self._set_length(row, context)
        for chunk in plan.prefill:
            self._set_length(chunk.row, chunk.start + len(chunk.token_ids))
        places = {self.adapters[row] for row in named if self.adapters[row]}
        self.queue.append(Launch(plan, set(named), {page: self.times_freed[page] for page in pages}, self.era, places))

    def result(self, plan: StepPlan, broken: Collection[int] = ()) -> StepResult:
        """Run the oldest step in flight, which must be `plan`; `broken` rows get values that are not finite."""
        launch = self.queue[0]
        check(launch.plan is plan, "steps end in the order of their launches")
        for page, freed in launch.pages.items():
            check(self.times_freed[page] == freed, f"page {page} was freed before step {plan.step} ran")
        for new in plan.new_rows:
            self.rows[new.row] = self._row(new, launch.era)
        for row, index, page in plan.new_pages:
            check(index == len(self.rows[row].pages), "a page table has a gap")
            self.rows[row].pages.append(page)
        if self.states is not None:
            self.states.load(plan)
        if self.windows is not None:
            self.windows.enter(plan)
        drawn = self._decode(plan, broken)
        self._check_shared(plan)
        drawing: list[int] = []
        pooled: list[array[float] | None] = []
        for chunk in plan.prefill:
            self._prefill(chunk, chunk.row in broken)
            if chunk.pool is not None:
                pooled.append(self._pool(chunk))
            if chunk.samples:
                for row in (chunk.row, *chunk.forks):
                    self.rows[row].broken = self.rows[chunk.row].broken
                    drawing.append(row)
        if self.states is not None:
            rows = {row: (state.path, state.length, state.era, state.broken) for row, state in self.rows.items()}
            self.states.save(plan, rows)
            self.states.copy(plan)
        drawn += [(row, [self._draw(row)]) for row in drawing]
        check([row for row, _ in drawn] == plan.sampled_rows, "draws are out of order")
        self.drafts.make(plan)
        for source, destination in plan.page_copies:
            size = self.page_size
            for cells in (self.slots, self.eras):
                cells[destination * size : (destination + 1) * size] = cells[source * size : (source + 1) * size]
        if self.windows is not None:
            self.windows.copy(plan)
        self.tokens += plan.num_tokens
        self.queue.popleft()
        if self.states is not None:
            for failed in launch.failed_after:
                self.states.fail(failed)
        finite = [not self.rows[row].broken for row, _ in drawn]
        finite_chunks = [not self.rows[chunk.row].broken for chunk in plan.prefill]
        return StepResult(
            [token_id for _, token_ids in drawn for token_id in token_ids],
            finite,
            None,
            finite_chunks=finite_chunks,
            pooled=pooled,
            counts=[len(token_ids) for _, token_ids in drawn] if plan.drafts else (),
        )

    def fail(self, plan: StepPlan) -> None:
        """Let a step fail. It and its successors leave garbage and do not run."""
        failed: list[StepPlan] = []
        while self.queue and self.queue[-1].plan.step >= plan.step:
            launch = self.queue.pop()
            self.lost |= launch.rows
            failed.append(launch.plan)
        if self.queue:
            self.queue[-1].failed_after += failed  # earlier steps still run
        elif self.states is not None:
            for one in failed:
                self.states.fail(one)
        # It is unknown what the steps wrote before they failed, so their slots stay poisoned.

    def _set_length(self, row: int, length: int) -> None:
        """Set a row's length after the step that is launched. It must have pages for all these tokens."""
        self.lengths[row] = length
        check(length <= len(self.tables[row]) * self.page_size, f"row {row} has no page for token {length - 1}")

    def _pages(self, new: NewRow, tables: Mapping[int, list[int]]) -> list[int]:
        """Return the pages that a new row begins with: its own, or the full pages of the row that it forks from."""
        if new.copy_of is None:
            return list(new.pages)
        check(not new.pages, "a row that forks brings no pages")
        return tables[new.copy_of][: new.length // self.page_size]

    # ---- the forward pass ---------------------------------------------------------------------------------

    def _row(self, new: NewRow, era: int) -> Row:
        adapter = self.places[new.adapter]
        path = self.prefixes.path(root(new.seed, adapter), new.tokens)
        check(new.length <= len(path) and new.prompt_len <= len(path), "a new row is longer than its tokens")
        if new.copy_of is not None:
            check(self.rows[new.copy_of].path == path, "a row forks from one with other tokens")
            era = self.rows[new.copy_of].era
        pages = self._pages(new, {row: state.pages for row, state in self.rows.items()})
        return Row(new.seed, pages, new.length, era, path, new.adapter, adapter)

    def _check_shared(self, plan: StepPlan) -> None:
        """Check that the rows of a shared run begin with the same tokens, and have further tokens of their own."""
        places = [place for run in plan.shared for place in run.members]
        check(len(places) == len(set(places)), "a row is in two runs")
        for run in plan.shared:
            states = [self.rows[plan.decode[place]] for place in run.members]
            check(len(states) > 1 and run.tokens > 0 and run.tokens % self.page_size == 0, "a run that shares nothing")
            for state in states:
                check(state.length > run.tokens, "a run is as long as a row that shares it")
                check(state.path[run.tokens - 1] == states[0].path[run.tokens - 1], "a run is not what its rows share")

    def _decode(self, plan: StepPlan, broken: Collection[int]) -> list[tuple[int, list[int]]]:
        """Run the rows that decode. Returns the tokens that each of them keeps: the accepted drafts and one more."""
        drawn: list[tuple[int, list[int]]] = []
        drafts = list(plan.drafts) or [0] * len(plan.decode)
        contexts = list(plan.contexts) or [self.rows[row].length + 1 for row in plan.decode]
        for row, count, context in zip(plan.decode, drafts, contexts, strict=True):
            state = self.rows[row]
            check(len(state.path) == state.length + 1, f"row {row} has not drawn the token that it should feed")
            check(state.length + 1 + count <= context, f"row {row} gets longer than {context} tokens")
            state.broken = state.broken or row in broken
            accepted = self.drafts.accept(row, count)
            token_ids = [self._draw(row) for _ in range(1 + accepted)]
            self._forward(row, 1 + count, state.broken, refused=count - accepted)
            drawn.append((row, token_ids))
        return drawn

    def _prefill(self, chunk: PrefillChunk, broken: bool) -> None:
        state = self.rows[chunk.row]
        end = chunk.start + len(chunk.token_ids)
        check(chunk.start == state.length, f"the chunk starts at {chunk.start}, the row is {state.length} long")
        check(chunk.start < end <= len(state.path), "a chunk without tokens, or with tokens that nobody knows")
        last = end == len(state.path)
        if chunk.pool is None:
            check(chunk.samples == last, "the last chunk draws, and only the last")
        else:
            check(last or chunk.pool.needs_all_tokens, "a chunk is pooled of which nothing is wanted")
            check(not chunk.samples, "a prompt that is pooled draws")
        prefix = state.path[chunk.start - 1] if chunk.start else self.prefixes.grow(0, root(state.seed, state.adapter))
        for place, token_id in enumerate(chunk.token_ids, chunk.start):
            prefix = self.prefixes.grow(prefix, token_id)
            check(prefix == state.path[place], f"token {place} of the chunk is not the row's")
        self._forward(chunk.row, len(chunk.token_ids), broken)
        for fork in chunk.forks:
            sibling = self.rows[fork]
            check(sibling.length == end and sibling.path == state.path, "a sibling differs from its leader")

    def _forward(self, row: int, count: int, broken: bool, refused: int = 0) -> None:
        """Write `count` tokens of a row, then attend to all tokens up to them. The last `refused` ones are forgotten.

        The tokens are in the row's path, except for refused ones.
        """
        state, size = self.rows[row], self.page_size
        check(self.places[state.place] == state.adapter, f"place {state.place} has another adapter than row {row}")
        state.broken = state.broken or broken
        start, end = state.length, state.length + count
        state.length = end - refused
        if self.states is not None:
            self.states.advance(row, state.path, start, state.length, state.era, state.broken, refused)
        if self.windows is not None:
            self.windows.forward(row, state.path, start, state.length, state.era, state.broken, refused)
        check(end <= len(state.pages) * size, f"row {row} writes token {end - 1} into no page")
        for place in range(start, end):
            page = state.pages[place // size]
            slot = page * size + place % size
            is_own = self.slots[slot] == REFUSED and self.refused[slot] is state
            check(self.slots[slot] == POISON or is_own, f"row {row} overwrites slot {place % size} of page {page}")
            if place >= state.length:
                self.slots[slot], self.refused[slot] = REFUSED, state
            else:
                self.slots[slot] = BROKEN if state.broken else state.path[place]
            self.eras[slot] = state.era
        if state.broken:
            return
        context: list[int] = []
        for page in state.pages[: -(-state.length // size)]:
            context += self.slots[page * size : (page + 1) * size]
        for place, (found, wanted) in enumerate(zip(context, state.path[: state.length])):
            era = self.eras[state.pages[place // size] * size + place % size]
            check(era >= state.era, f"row {row} reads at position {place} what was there before the cache was flushed")
            check(found == wanted, f"row {row} reads a wrong token at position {place} of {state.length}: {found}")

    def _pool(self, chunk: PrefillChunk) -> array[float] | None:
        state, end = self.rows[chunk.row], chunk.start + len(chunk.token_ids)
        return None if state.broken else array("d", [chunk.start, end, state.path[end - 1]])

    def _draw(self, row: int) -> int:
        """Draw from the row's logits. The token stays on the device as the next one to feed."""
        state = self.rows[row]
        token_id = draw(self.prefixes.states[state.path[-1]], state.seed, self.vocab)
        state.path.append(self.prefixes.grow(state.path[-1], token_id))
        return -7 if state.broken else token_id


def check(condition: bool, message: str) -> None:
    """Raise `AssertionError` with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)
