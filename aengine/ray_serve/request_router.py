"""The prefix router on Ray's seam: a `RequestRouter`, which Ray asks for each call of the engines' handle."""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aengine.ray_serve.routing.cached_keys import Changes
from aengine.ray_serve.routing.load import Report
from aengine.ray_serve.routing.prompt import Prompt
from aengine.ray_serve.routing.router import PrefixRouter

NEWS = "news"  # arguments that are for the router alone
BEGUN = "begun"
TO = "to"
_GIVEN_UP = 60.0  # seconds that a replica may take to accept a request before it is believed to have none of it


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Keeps `PrefixRouter` in step with what Ray says of its replicas, and asks it.

    A call carries its `number` and `prompt`; by `news` what replicas told of their caches in their last answers, and by
    `begun` which calls, streamed ones, have had their first token since, and when. One that is meant for a certain
    replica carries its name, as `to`.
    """

    def initialize_state(self, policy: str = "prefix", max_keys: int | None = None) -> None:
        """For Ray, with `request_router_kwargs`."""
        self._policy = policy
        self._router: PrefixRouter[str] = PrefixRouter(max_keys=max_keys)
        self._name = ""  # by which replicas know this router, once a call has said so
        self._by_name: dict[str, RunningReplica] = {}
        self._chosen: dict[str, tuple[str, int]] = {}  # Ray's id of a request -> the replica it went to, its number
        self._ahead: dict[int, tuple[str, int]] = {}  # a call without a token -> its replica, what it lacks
        self._unaccepted: dict[str, float] = {}  # Ray's id of a request -> when it was chosen for, the oldest first

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """For Ray: the replicas that run now, with their newest reports."""
        running = self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in set(self._router.replicas) - running.keys():
            self._router.leave(name)
        for name, replica in running.items():
            self._router.join(name)
            report = Report.from_stats(replica.routing_stats)
            if report is not None:
                self._router.reported(name, report, self._name)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """For Ray: nothing goes there any more."""
        self._router.leave(replica_id.unique_id)
        self._by_name.pop(replica_id.unique_id, None)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """For Ray: the replica for a request. Asked again about the same one, where it was not taken."""
        if pending_request is None or not candidate_replicas:
            return []
        self._name = pending_request.kwargs.get("router", self._name)
        if (to := pending_request.kwargs.pop(TO, None)) is not None:
            return [[self._by_name[to]]] if to in self._by_name else []
        self._take_news(pending_request.kwargs.pop(NEWS, ()))
        for number, when in pending_request.kwargs.pop(BEGUN, ()):
            self._begun(number, when)
        request_id, now = pending_request.metadata.internal_request_id, time.monotonic()
        if request_id in self._chosen:
            self._ended(request_id, now)
        self._forget_given_up(now)
        prompt = pending_request.kwargs.get("prompt") or Prompt()
        if not len(self._router):
            return []
        if prompt.keeper is not None and prompt.keeper in self._router:
            name = prompt.keeper
        else:
            name = (
                self._router.choose(prompt, now) if self._policy == "prefix" else random.choice(self._router.replicas)
            )
        number = pending_request.kwargs.get("number", -1)
        told = prompt.streamed and number >= 0
        cached = self._router.sent(name, prompt, now, told)
        if told:
            self._ahead[number] = name, prompt.tokens - cached
        self._chosen[request_id] = name, number
        self._unaccepted[request_id] = now
        return [[self._by_name[name]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """For Ray: a replica has accepted a request, so that its end will be told."""
        self._unaccepted.pop(pending_request.metadata.internal_request_id, None)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """For Ray: a request ended, however it did."""
        if self._chosen.get(internal_request_id, ("", 0))[0] == replica_id.unique_id:
            self._ended(internal_request_id, time.monotonic())

    def _forget_given_up(self, now: float) -> None:
        """Forget requests that never went: one whose client leaves between choice and sending ends without a word."""
        while self._unaccepted:
            request_id, chosen = next(iter(self._unaccepted.items()))
            if now - chosen < _GIVEN_UP:
                return
            self._ended(request_id, now)

    def _ended(self, request_id: str, now: float) -> None:
        name, number = self._chosen.pop(request_id)
        self._unaccepted.pop(request_id, None)
        self._begun(number, now)  # perhaps it never had a token
        self._router.ended(name)

    def _begun(self, number: int, when: float) -> None:
        if (ahead := self._ahead.pop(number, None)) is not None:
            self._router.begun(*ahead, when)

    def _take_news(self, news: list[tuple[str, Changes]]) -> None:
        for name, changes in news:
            if changes.anew:
                self._router.cleared(name)
            self._router.evicted(name, changes.evicted)
            self._router.stored(name, changes.stored)

    def check_integrity(self, **_: Any) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        self._router.check_integrity()
