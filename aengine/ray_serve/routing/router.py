"""Chooses a replica for each prompt."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from math import inf
from random import Random
from typing import Generic, TypeVar

from aengine.ray_serve.routing.index import PrefixIndex
from aengine.ray_serve.routing.load import ReplicaLoad, Report, Speed
from aengine.ray_serve.routing.prompt import Prompt

R = TypeVar("R", bound=Hashable)

_SAMPLE = 8  # holders of one prefix that are compared
_HOLDER_FACTOR = 4  # the least growth in holders to the next shorter prefix, if not all holders are compared
_RANDOM_COUNT = 4  # random replicas that are compared, whatever they hold


class PrefixRouter(Generic[R]):
    """Chooses the replica that would answer a prompt first, by its cached tokens and the work ahead of it.

    The cost of a replica is in seconds: the tokens that it would have to compute, times the seconds for a token there,
    plus its work ahead (`ReplicaLoad`). The least cost wins. If costs are equal, the least busy replica wins.

    Not every replica is compared. Candidates are:

    - up to eight holders of the longest cached prefix, then of shorter prefixes that more replicas hold. After a prefix
      with eight or more holders, the next one has more than four times as many.
    - four random replicas. With two random choices or more, the fullest replica is hardly fuller than the mean.

    The search ends when computing the missing tokens alone costs more than the best candidate.

    A chat therefore stays with the replica that has its turns cached, because another one must compute the whole
    history. A prompt that many clients send is computed by a further replica as soon as the wait at its holders is
    longer than the prompt takes. That replica then is a holder too.

    `R` names a replica. max_keys: bounds memory, at about 250 bytes each; None: see `PrefixIndex`.
    """

    def __init__(self, *, max_keys: int | None = None, seed: int | None = None) -> None:
        self._index = PrefixIndex(max_keys)
        self._random = Random(seed)
        self._slots: dict[R, int] = {}
        self._names: list[R | None] = []  # by slot
        self._loads: list[ReplicaLoad] = []  # by slot
        # Copies of the loads' values that a choice reads. In arrays they are close together in memory.
        self._busy_until = array("d")
        self._steady = array("d")
        self._prefill = array("d")  # seconds per prompt token
        self._live: list[int] = []  # slots with a replica
        self._vacant: list[int] = []  # slots whose replica has left
        self._fastest = inf  # least seconds per prompt token of any replica

    def __len__(self) -> int:
        """Return the number of replicas."""
        return len(self._slots)

    def __contains__(self, replica: R) -> bool:
        return replica in self._slots

    @property
    def replicas(self) -> list[R]:
        """The replicas that may be chosen."""
        return list(self._slots)

    def join(self, replica: R, speed: Speed | None = None) -> None:
        """Add a replica with an empty cache. Does nothing if it is known."""
        if replica in self._slots:
            return
        load = ReplicaLoad(speed or Speed())
        if self._vacant:
            slot = self._vacant.pop()
            self._names[slot], self._loads[slot] = replica, load
        else:
            slot = len(self._names)
            self._names.append(replica)
            self._loads.append(load)
            for column in (self._busy_until, self._steady, self._prefill):
                column.append(0.0)
        self._slots[replica] = slot
        self._update_columns(slot)
        self._live.append(slot)
        self._fastest = min(self._fastest, load.costs.prefill)
        self._index.join(slot)

    def leave(self, replica: R) -> None:
        """Remove a replica and its keys."""
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._index.leave(slot)
            self._names[slot] = None
            self._live.remove(slot)
            self._vacant.append(slot)

    def choose(self, prompt: Prompt, now: float) -> R:
        """Return the replica for a prompt at `now`, in seconds of any steady clock. Changes nothing; see `sent`.

        Raises `LookupError` if there is no replica.
        """
        if not self._live:
            raise LookupError("there is no replica")
        index, keys, ends, tokens = self._index, prompt.keys, prompt.ends, prompt.tokens
        busy_until, steady, prefill = self._busy_until, self._steady, self._prefill
        best, best_cost, best_delay = -1, inf, inf
        depth = index.depth(keys, len(keys))
        while True:
            if depth:
                slots, many, missing = index.holders(keys[depth - 1]), _SAMPLE, tokens - ends[depth - 1]
            else:
                slots, many, missing = self._live, _RANDOM_COUNT, tokens
            if missing * self._fastest > best_cost:  # no idle replica with this prefix or a shorter one would be sooner
                break
            held = len(slots)
            for slot in slots if held <= many else self._sample(slots, many):
                delay = steady[slot]
                if (until := busy_until[slot]) > now:
                    delay += until - now
                cost = delay + missing * prefill[slot]
                if cost < best_cost or (cost == best_cost and delay < best_delay):
                    best, best_cost, best_delay = slot, cost, delay
            if not depth:
                break
            # A holder of a skipped prefix is compared as a holder of a shorter one: its cost is overestimated.
            depth = index.depth(keys, depth - 1, held if held < _SAMPLE else _HOLDER_FACTOR * held)
        return self._name(best)

    def sent(self, replica: R, prompt: Prompt, now: float, reports_start: bool = False) -> int:
        """Note that a prompt went to a replica, which will have it cached. Return its tokens that were cached before.

        reports_start: `started` will be called for it.
        """
        slot = self._slots[replica]
        cached = self.cached_tokens(replica, prompt)
        self._loads[slot].sent(prompt.tokens - cached, now, reports_start)
        self._update_columns(slot)
        self._index.add(slot, prompt.keys)
        return cached

    def started(self, replica: R, tokens: int, when: float) -> None:
        """Note that an answer had its first token at `when`, after this many prompt tokens were computed."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._loads[slot].started(tokens, when)
            self._update_columns(slot)

    def ended(self, replica: R) -> None:
        """Note that a request sent to a replica has ended."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._loads[slot].ended()
            self._update_columns(slot)

    def reported(self, replica: R, report: Report, router: str = "") -> None:
        """Update a replica's load from its report. router: the name of this router in it."""
        slot = self._slots.get(replica)
        if slot is not None:
            load, costs = self._loads[slot], self._loads[slot].costs
            load.reported(report, router)
            self._update_columns(slot)
            if load.costs is not costs:
                self._fastest = min(self._prefill[live] for live in self._live)

    def stored(self, replica: R, keys: tuple[int, ...]) -> None:
        """Note keys that a replica has cached, from any router."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._index.add(slot, [key for key in keys if not self._index.holds(slot, key)])

    def evicted(self, replica: R, keys: tuple[int, ...]) -> None:
        """Note keys that a replica has evicted."""
        slot = self._slots.get(replica)
        if slot is not None:
            for key in keys:
                self._index.forget(slot, key)

    def cleared(self, replica: R) -> None:
        """Forget all keys of a replica."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._index.clear(slot)

    def cached_tokens(self, replica: R, prompt: Prompt) -> int:
        """Return how many tokens of a prompt a replica has cached, as far as this router knows."""
        depth = self._index.slot_depth(self._slots[replica], prompt.keys)
        return prompt.ends[depth - 1] if depth else 0

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        if sorted(self._live) != sorted(self._slots.values()):
            raise AssertionError("the slots of replicas and the live slots disagree")
        for slot in self._live:
            load = self._loads[slot]
            columns = self._busy_until[slot], self._steady[slot], self._prefill[slot]
            if columns != (load.busy_until, load.steady, load.costs.prefill):
                raise AssertionError(f"the columns of slot {slot} differ from its load")
        self._index.check_integrity()

    def _update_columns(self, slot: int) -> None:
        """Copy a slot's load into the columns."""
        load = self._loads[slot]
        self._busy_until[slot], self._steady[slot] = load.busy_until, load.steady
        self._prefill[slot] = load.costs.prefill

    def _sample(self, slots: list[int], count: int) -> list[int]:
        """Return `count` random slots, perhaps one of them twice."""
        draw, many = self._random.random, len(slots)
        return [slots[int(draw() * many)] for _ in range(count)]

    def _name(self, slot: int) -> R:
        name = self._names[slot]
        if name is None:
            raise LookupError(f"slot {slot} has no replica")
        return name
