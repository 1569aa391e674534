"""The choice of a replica for a prompt."""

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

_SAMPLE = 8  # holders of one beginning that are compared
_MORE = 4  # times as many hold the next shorter beginning that is looked at, where not all are compared
_FREE = 4  # replicas that are compared whatever they hold


class PrefixRouter(Generic[R]):
    """Sends a prompt to the replica that would answer first, counting what it has cached and what is ahead of it.

    The cost of a replica is in seconds: tokens that it would have to compute, times what a token takes there, plus its
    work ahead (`ReplicaLoad`). The candidates are found without looking at every replica: some holders of the longest
    cached beginning, then of the next shorter one that others hold as well (where eight or more hold one already: that
    more than four times as many do), and so on to the first; and a few replicas taken at random, whose least busy one
    stands for "anywhere else" (with two choices or more the fullest replica is hardly fuller than the mean). The search
    ends where computing what is missing alone costs more than the best one so far. The least cost wins; where costs
    tie, the least busy.

    So a chat stays where its turns are cached, as going elsewhere costs its whole history; and a prompt that everybody
    sends is computed anew by another replica as soon as the queue at those that have it is longer than the prompt,
    after which that one counts among them.

    `R` is whatever names a replica. Memory is bounded by `max_keys` (about 250 bytes each; None: see `PrefixIndex`).
    """

    def __init__(self, *, max_keys: int | None = None, seed: int | None = None) -> None:
        self._index = PrefixIndex(max_keys)
        self._random = Random(seed)
        self._slots: dict[R, int] = {}
        self._names: list[R | None] = []  # by slot
        self._loads: list[ReplicaLoad] = []  # by slot
        # What a choice reads of loads, close together: in a large process an object is as far away as memory is.
        self._busy_until = array("d")
        self._steady = array("d")
        self._prefill = array("d")  # seconds a token
        self._live: list[int] = []  # slots of replicas that are there
        self._vacant: list[int] = []  # slots whose replica has left
        self._fastest = inf  # seconds a token of a prompt, no replica takes less

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self._slots)

    def __contains__(self, replica: R) -> bool:
        return replica in self._slots

    @property
    def replicas(self) -> list[R]:
        """Those that may be chosen."""
        return list(self._slots)

    def join(self, replica: R, speed: Speed | None = None) -> None:
        """Count on a replica, of which nothing is known yet."""
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
        self._changed(slot)
        self._live.append(slot)
        self._fastest = min(self._fastest, load.costs.prefill)
        self._index.join(slot)

    def leave(self, replica: R) -> None:
        """Forget a replica and all that it had cached."""
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._index.leave(slot)
            self._names[slot] = None
            self._live.remove(slot)
            self._vacant.append(slot)

    def choose(self, prompt: Prompt, now: float) -> R:
        """The replica that a prompt should go to at `now` (seconds of any steady clock); nothing is noted yet.

        Raises `LookupError` if there is none.
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
                slots, many, missing = self._live, _FREE, tokens
            if missing * self._fastest > best_cost:  # not even an idle one would be sooner, nor any that holds less
                break
            held = len(slots)
            for slot in slots if held <= many else self._some(slots, many):
                delay = steady[slot]
                if (until := busy_until[slot]) > now:
                    delay += until - now
                cost = delay + missing * prefill[slot]
                if cost < best_cost or (cost == best_cost and delay < best_delay):
                    best, best_cost, best_delay = slot, cost, delay
            if not depth:
                break
            # A holder of a beginning that is passed over would count as if it had to compute more than it has to.
            depth = index.depth(keys, depth - 1, held if held < _SAMPLE else _MORE * held)
        return self._name(best)

    def sent(self, replica: R, prompt: Prompt, now: float, told: bool = False) -> int:
        """Note that a prompt went to a replica, which will have it cached; the tokens of it that it had already.

        `told`: `begun` will be called for it.
        """
        slot = self._slots[replica]
        depth = self._index.depth_of(slot, prompt.keys)
        cached = prompt.ends[depth - 1] if depth else 0
        self._loads[slot].sent(prompt.tokens - cached, now, told)
        self._changed(slot)
        self._index.add(slot, prompt.keys)
        return cached

    def begun(self, replica: R, tokens: int, when: float) -> None:
        """Note that the first token of an answer was there at `when`, for which so many had to be computed."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._loads[slot].begun(tokens, when)
            self._changed(slot)

    def ended(self, replica: R) -> None:
        """Note that a request that was sent to a replica has ended there."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._loads[slot].ended()
            self._changed(slot)

    def reported(self, replica: R, report: Report, router: str = "") -> None:
        """Take over what a replica says of its load; `router` is this one's name there."""
        slot = self._slots.get(replica)
        if slot is not None:
            load, costs = self._loads[slot], self._loads[slot].costs
            load.reported(report, router)
            self._changed(slot)
            if load.costs is not costs:
                self._fastest = min(self._prefill[live] for live in self._live)

    def stored(self, replica: R, keys: tuple[int, ...]) -> None:
        """Note what a replica has cached, whoever sent it."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._index.add(slot, [key for key in keys if not self._index.holds(slot, key)])

    def evicted(self, replica: R, keys: tuple[int, ...]) -> None:
        """Note what a replica has evicted."""
        slot = self._slots.get(replica)
        if slot is not None:
            for key in keys:
                self._index.forget(slot, key)

    def cleared(self, replica: R) -> None:
        """Note that nothing is known any more of what a replica has cached."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._index.clear(slot)

    def cached_tokens(self, replica: R, prompt: Prompt) -> int:
        """The tokens of a prompt that a replica is believed to have cached."""
        depth = self._index.depth_of(self._slots[replica], prompt.keys)
        return prompt.ends[depth - 1] if depth else 0

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        if sorted(self._live) != sorted(self._slots.values()):
            raise AssertionError("the slots of replicas and the live slots disagree")
        for slot in self._live:
            load = self._loads[slot]
            columns = self._busy_until[slot], self._steady[slot], self._prefill[slot]
            if columns != (load.busy_until, load.steady, load.costs.prefill):
                raise AssertionError(f"the columns of slot {slot} are not its load's")
        self._index.check_integrity()

    def _changed(self, slot: int) -> None:
        """Carry a load over to the columns."""
        load = self._loads[slot]
        self._busy_until[slot], self._steady[slot] = load.busy_until, load.steady
        self._prefill[slot] = load.costs.prefill

    def _some(self, slots: list[int], count: int) -> list[int]:
        """A few of many slots, perhaps one of them twice."""
        draw, many = self._random.random, len(slots)
        return [slots[int(draw() * many)] for _ in range(count)]

    def _name(self, slot: int) -> R:
        name = self._names[slot]
        if name is None:
            raise LookupError(f"slot {slot} has no replica")
        return name
