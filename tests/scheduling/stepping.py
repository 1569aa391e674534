"""Steps a scheduler and a fake device as the engine's loop does."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aengine.cache.radix import packed
from aengine.cache.snapshots import SnapshotRoom
from aengine.cache.windows import WindowRoom
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.addons.adapter_queue import AdapterLoad, AdapterQueue
from aengine.scheduling.addons.snapshots import SequenceSnapshots
from aengine.scheduling.addons.windows import SequenceWindows
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import LoadedAdapter, Phase, Sequence, Update, sibling_of
from aengine.step_cost import FREE, StepCost
from aengine.step_plan import MixedLimit, Pool, StepPlan
from aengine.types import FinishReason
from tests.scheduling.fake_device import POISON, FakeDevice, check
from tests.scheduling.fake_model import naive_output
from tests.scheduling.fake_tiers import FakeTiers

Kind = Literal["last", "mean"]
AGING = 30.0  # seconds of waiting that outweigh one level of priority
VOCAB = 2**24  # so large that no token is drawn twice in an example


@dataclass
class Got:
    """The tokens that the client of one sequence has received so far."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cut: bool = False  # ended by a stop string

    def take(self, update: Update) -> None:
        check(self.finish_reason is None, "something came after the last token")
        if update.finite and update.sequence.pool is None:
            self.token_ids += update.token_ids
        self.finish_reason = update.finish_reason


class Seen:
    """Replaces a grammar: keeps the accepted tokens, and says whether the next mask is late."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.late = False
        self.takes_drafts = True

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)


def prompt_of(length: int, first: int = 0) -> list[int]:
    """Return a prompt.

    Prompts that differ in `first` share no prefix; otherwise the shorter is a prefix of the longer.
    """
    return list(range(first * 1000, first * 1000 + length))


class Stepper:
    """Runs requests on a scheduler and a fake device.

    `lookahead` is the number of steps that are launched before the oldest one is read. With `places`, awaited adapters
    are loaded while steps run; each takes `load_steps`. With `host_slots`, pages are copied to host memory, and up to
    `disk_pages` of them to a disk; a copy takes `copy_turns`. With `most_drafts`, rows verify drafts, and `accepts`
    says how many are accepted (`FakeDrafts`).
    """

    def __init__(
        self,
        *,
        num_pages: int = 1000,
        page_size: int = 16,
        max_rows: int = 8,
        max_step_tokens: int = 512,
        max_queue: int = 1000,
        prefix_cache: bool = True,
        lookahead: int = 1,
        vocab: int = VOCAB,
        places: int = 0,
        load_steps: int = 2,
        host_slots: int = 0,
        disk_pages: int = 0,
        copy_pages: int = 1000,
        copy_turns: int = 2,
        snapshots: SnapshotRoom | None = None,
        windows: WindowRoom | None = None,
        most_drafts: int = 0,
        accepts: Collection[int] = (0,),
        step_cost: StepCost = FREE,
        mixed_limit: MixedLimit | None = None,
    ) -> None:
        self.adapters = AdapterQueue(places) if places else None
        self.snapshots: SequenceSnapshots | None = None
        if snapshots is not None:
            room = snapshots if prefix_cache else replace(snapshots, count=0)
            self.snapshots = SequenceSnapshots(room, max_rows, page_size, most_drafts > 0)
        self.windows = None if windows is None else SequenceWindows(windows, page_size)
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_queue=max_queue,
            prefix_cache=prefix_cache,
            make_sibling=self._sibling,
            waiting=self.adapters,
            holdings=[holding for holding in (self.windows, self.snapshots) if holding is not None],
            most_drafts=most_drafts,
            step_cost=step_cost,
            mixed_limit=mixed_limit,
        )
        self.device = FakeDevice(self.scheduler, num_pages, page_size, vocab, tuple(accepts), most_drafts > 0)
        self.tiers = (
            FakeTiers(self.scheduler, self.device, host_slots, disk_pages, copy_pages, copy_turns)
            if host_slots
            else None
        )
        self.max_step_tokens = max_step_tokens
        self.lookahead = lookahead
        self.in_flight: deque[StepPlan] = deque()
        self.got: dict[Sequence, Got] = {}
        self._families: dict[int, list[Sequence]] = {}  # ticket -> the sequences of a request
        self._tickets = itertools.count()
        self._generations = itertools.count(1)
        self.load_steps = load_steps
        self.loads: list[tuple[AdapterLoad, int]] = []  # running loads, and the turns that each still takes

    # ---- requests -----------------------------------------------------------------------------------------

    def request(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        stop_ids: tuple[int, ...] = (),
        seed: int = 0,
        tenant: int = 0,
        arrival: float = 0.0,
        priority: int = 0,
        grammar: bool = False,
        adapter: LoadedAdapter | None = None,
        speculates: bool = True,
    ) -> list[Sequence]:
        """Enqueue a request with n choices. Returns the list of its sequences, which grows as they are made."""
        rank = (arrival + priority * AGING, next(self._tickets))
        salt = f"tenant {tenant}" if tenant else None
        leader = Sequence(
            prompt=packed(prompt),
            params=SamplingParams(max_tokens=max_tokens, n=n),
            seed=(tenant << 32) + seed * 1000,
            stop_ids=stop_ids,
            max_total=len(prompt) + max_tokens,
            rank=rank,
            salt=salt if adapter is None else (adapter.generation, salt),
            adapter=adapter,
            siblings=n - 1,
            grammar=Seen() if grammar else None,
            speculates=speculates,
        )
        self.scheduler.add(leader)
        self.got[leader] = Got(list(prompt))
        family = self._families[rank[1]] = [leader]
        return family

    def pool(self, prompts: Collection[list[int]], kind: Kind = "last", **options: Any) -> list[Sequence]:
        """Enqueue pooled prompts as one request. options: tenant, arrival and priority, as in `request`."""
        tenant, priority = options.get("tenant", 0), options.get("priority", 0)
        sequences = [
            Sequence(
                prompt=packed(prompt),
                params=SamplingParams(),
                seed=tenant << 32,
                stop_ids=(),
                max_total=len(prompt) + 1,
                rank=(options.get("arrival", 0.0) + priority * AGING, next(self._tickets)),
                salt=f"tenant {tenant}" if tenant else None,
                pool=Pool(kind),
            )
            for prompt in prompts
        ]
        self.scheduler.add_pooled(sequences)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            self.got[sequence] = Got(list(prompt))
        return sequences

    def _sibling(self, leader: Sequence, index: int) -> Sequence:
        sibling = sibling_of(leader, index)
        sibling.seed += index - leader.index
        sibling.grammar = None if leader.grammar is None else Seen()
        self.got[sibling] = Got(list(leader.prompt))
        family = self._families[leader.rank[1]]
        check(len(family) == index, "choices are made in order, and once")
        family.append(sibling)
        return sibling

    def add(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> Sequence:
        """Enqueue a request with one choice. options: as in `request`."""
        return self.request(prompt, max_tokens, **options)[0]

    def finish(self, sequence: Sequence, n_tokens: int) -> None:
        """End a sequence by a stop string after `n_tokens` tokens."""
        self.scheduler.finish(sequence, n_tokens)
        got = self.got[sequence]
        del got.token_ids[n_tokens:]
        got.finish_reason, got.cut = "stop", True

    def flush(self) -> None:
        """Flush the prefix cache."""
        self.scheduler.flush_cache()
        self.device.flush()

    def abort(self, sequence: Sequence) -> None:
        """End a sequence and the choices that have yet to fork from it."""
        self.scheduler.abort(sequence)
        self.got[sequence].finish_reason = self.got[sequence].finish_reason or "abort"

    # ---- adapters -----------------------------------------------------------------------------------------

    def adapter(self) -> LoadedAdapter:
        """Return a new adapter, which is not on the device."""
        return LoadedAdapter(next(self._generations))

    def begin_loads(self) -> list[AdapterLoad]:
        """Begin the loads that are due."""
        begun = []
        while self.adapters is not None and (load := self.adapters.next_load()) is not None:
            self.device.overwrite(load.place, POISON)
            self.loads.append((load, self.load_steps))
            begun.append(load)
        return begun

    def end_load(self, which: int = 0) -> None:
        """End a load: its weights have arrived."""
        load, _ = self.loads.pop(which)
        self.device.overwrite(load.place, load.adapter.generation)
        self._adapters().finish_load(load)

    def fail_load(self, which: int = 0) -> None:
        """Let a load fail, and abort the sequences that wait for its adapter."""
        load, _ = self.loads.pop(which)
        for sequence in self._adapters().fail_load(load):
            self.abort(sequence)

    def advance_loads(self) -> None:
        """Advance all loads by one turn."""
        self.loads = [(load, turns - 1) for load, turns in self.loads]
        for which in reversed([which for which, (_, turns) in enumerate(self.loads) if turns <= 0]):
            self.end_load(which)
        self.begin_loads()

    def _adapters(self) -> AdapterQueue:
        if self.adapters is None:
            raise ValueError("there are no places for adapters")
        return self.adapters

    # ---- steps --------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan a step and launch it."""
        plan = self.scheduler.schedule()
        if plan is not None:
            check(plan.num_tokens <= self.max_step_tokens, f"{plan.num_tokens} tokens in one step")
            self.device.launch(plan)
            self.in_flight.append(plan)
        return plan

    def commit(self, broken: Collection[int] = ()) -> list[Update]:
        """Read the oldest step in flight; `broken` rows get values that are not finite."""
        plan = self.in_flight.popleft()
        updates = self.scheduler.commit(plan, self.device.result(plan, broken))
        for update in updates:
            self.got[update.sequence].take(update)
        self._check_counts()
        return updates

    def _check_counts(self) -> None:
        """Check that a sequence counts the tokens that the device has computed, and all tokens of steps in flight."""
        new = {row.row for plan in self.in_flight for row in plan.new_rows}
        ahead: Counter[int] = Counter()
        for plan in self.in_flight:
            ahead.update(dict(zip(plan.decode, (1 + drafts for drafts in plan.drafts or [0] * len(plan.decode)))))
            ahead.update({chunk.row: len(chunk.token_ids) for chunk in plan.prefill})
        for sequence in self.got:
            if sequence.phase is Phase.RUNNING and sequence.row not in new:
                computed = self.device.rows[sequence.row].length
                check(sequence.computed == computed, f"{computed} tokens are computed, not {sequence.computed}")
                launched = computed + ahead[sequence.row]
                check(sequence.launched == launched, f"{launched} tokens are launched, not {sequence.launched}")

    def fail(self, place: int = 0) -> list[Sequence]:
        """Let a step in flight fail, and give up its successors."""
        plan = self.in_flight[place]
        self.device.fail(plan)
        while len(self.in_flight) > place:
            self.in_flight.pop()
        failed = self.scheduler.fail(plan)
        for sequence in failed:
            self.got[sequence].finish_reason = "error"
        return failed

    def step(self) -> StepPlan | None:
        """Run one turn of the loop: launch the next step, then read the oldest if `lookahead` steps are ahead of it."""
        if self.adapters is not None:
            self.advance_loads()
        if self.tiers is not None:
            self.tiers.step()
        plan = self.schedule()
        if self.in_flight and (plan is None or len(self.in_flight) > self.lookahead):
            self.commit()
        return plan

    def run(self, limit: int = 10_000) -> list[StepPlan]:
        """Step until nothing is left to do, in fewer than `limit` turns. Then check the pool."""
        plans = []
        while not self.scheduler.idle:
            plan = self.step()
            if plan is not None:
                plans.append(plan)
            limit -= 1
            check(limit >= 0, "the scheduler goes round in circles")
        self.scheduler.check_integrity()
        return plans

    # ---- what must be true --------------------------------------------------------------------------------

    def expected(self, sequence: Sequence) -> list[int]:
        """Return the output of the sequence if nothing stops it early."""
        prompt = self.got[sequence].prompt
        adapter = 0 if sequence.adapter is None else sequence.adapter.generation
        return naive_output(prompt, sequence.seed, sequence.stop_ids, sequence.max_total, self.device.vocab, adapter)

    def check_pooled(self, sequence: Sequence) -> None:
        """Check that a finished prompt was pooled completely: its last token, or each token once for a mean."""
        prompt, pool = self.got[sequence].prompt, sequence.pool
        check(pool is not None and not sequence.output, "a prompt that is pooled has drawn")
        if self.got[sequence].finish_reason != "stop" or pool is None:
            return
        path = self.device.prefixes.path(sequence.seed >> 32, prompt)
        check(all(path[int(end) - 1] == prefix for _, end, prefix in sequence.pooled), "other tokens were pooled")
        begins, ends = [int(start) for start, _, _ in sequence.pooled], [int(end) for _, end, _ in sequence.pooled]
        check(ends[-1] == len(prompt), "what was pooled is not the prompt's end")
        if pool.needs_all_tokens:
            check(begins == [0, *ends[:-1]], f"chunks from {begins} to {ends} were pooled")
        else:
            check(len(ends) == 1, f"{len(ends)} chunks were pooled")

    def check_output(self, sequence: Sequence) -> None:
        """Check that the client has the naive output, or its beginning if something ended the sequence early."""
        if sequence.pool is not None:
            self.check_pooled(sequence)
            return
        got, expected = self.got[sequence], self.expected(sequence)
        check(got.token_ids == expected[: len(got.token_ids)], f"got {got.token_ids}, expected {expected}")
        if got.finish_reason in ("length", "stop") and not got.cut:
            check(len(got.token_ids) == len(expected), f"ended by {got.finish_reason} after {got.token_ids}")
            reason = "stop" if expected[-1] in sequence.stop_ids else "length"
            check(got.finish_reason == reason, f"ended by {got.finish_reason}, not by {reason}")

    def check_outputs(self) -> None:
        """Check that every client got an end and the right tokens, and that no choice was forgotten."""
        for family in self._families.values():
            n, ends = family[0].params.n, {self.got[sequence].finish_reason for sequence in family}
            check(len(family) == n or bool(ends & {"abort", "error"}), f"{len(family)} of {n} choices were made")
        for sequence, got in self.got.items():
            check(got.finish_reason is not None, f"a client waits forever: {got}")
            self.check_output(sequence)
