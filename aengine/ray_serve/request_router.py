"""The prefix router as a Ray `RequestRouter`. Ray asks it for each call of the engines' handle."""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aengine.ray_serve.routing.cached_keys import Changes
from aengine.ray_serve.routing.load import Report
from aengine.ray_serve.routing.prompt import Prompt
from aengine.ray_serve.routing.router import PrefixRouter

CACHE_CHANGES, STARTED, TO = "cache_changes", "started", "to"  # arguments for the router alone
_FORGET_SECONDS = 60.0  # a request that no replica has accepted after these seconds is forgotten


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Keeps a `PrefixRouter` up to date with Ray's replicas, and asks it.

    Each call has the arguments `number` and `prompt`, and two with the events since the last call. `cache_changes` are
    the changes that replicas reported. `started` has the streamed calls that had their first token, and its time. If a
    call is for one replica only, `to` is its name.
    """

    def initialize_state(self, policy: str = "prefix", max_keys: int | None = None) -> None:
        """Set up the router. Ray calls it with `request_router_kwargs`."""
        self._policy = policy
        self._router: PrefixRouter[str] = PrefixRouter(max_keys=max_keys)
        self._name = ""  # this router's name at replicas; the first call has it
        self._by_name: dict[str, RunningReplica] = {}
        self._chosen: dict[str, tuple[str, int]] = {}  # Ray's request id -> its replica and number
        self._ahead: dict[int, tuple[str, int]] = {}  # call without a first token -> its replica, tokens to compute
        self._unaccepted: dict[str, float] = {}  # Ray's request id -> time of the choice, oldest first

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the running replicas and their newest reports. Called by Ray."""
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
        """Send no more requests to this replica. Called by Ray."""
        self._router.leave(replica_id.unique_id)
        self._by_name.pop(replica_id.unique_id, None)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request. Ray calls it again if the replica did not accept the request."""
        if pending_request is None or not candidate_replicas:
            return []
        self._name = pending_request.kwargs.get("router", self._name)
        if (to := pending_request.kwargs.pop(TO, None)) is not None:
            return [[self._by_name[to]]] if to in self._by_name else []
        self._apply_changes(pending_request.kwargs.pop(CACHE_CHANGES, ()))
        for number, when in pending_request.kwargs.pop(STARTED, ()):
            self._started(number, when)
        request_id, now = pending_request.metadata.internal_request_id, time.monotonic()
        if request_id in self._chosen:
            self._ended(request_id, now)
        self._forget_unaccepted(now)
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
        reports_start = prompt.streamed and number >= 0
        cached = self._router.sent(name, prompt, now, reports_start)
        if reports_start:
            self._ahead[number] = name, prompt.tokens - cached
        self._chosen[request_id] = name, number
        self._unaccepted[request_id] = now
        return [[self._by_name[name]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Note that a replica has accepted a request, so that its end will be reported. Called by Ray."""
        self._unaccepted.pop(pending_request.metadata.internal_request_id, None)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended. Called by Ray."""
        if self._chosen.get(internal_request_id, ("", 0))[0] == replica_id.unique_id:
            self._ended(internal_request_id, time.monotonic())

    def _forget_unaccepted(self, now: float) -> None:
        """Forget requests that were never sent. Ray reports no end if a client leaves between choice and sending."""
        while self._unaccepted:
            request_id, chosen = next(iter(self._unaccepted.items()))
            if now - chosen < _FORGET_SECONDS:
                return
            self._ended(request_id, now)

    def _ended(self, request_id: str, now: float) -> None:
        name, number = self._chosen.pop(request_id)
        self._unaccepted.pop(request_id, None)
        self._started(number, now)  # in case it never had a token
        self._router.ended(name)

    def _started(self, number: int, when: float) -> None:
        if (ahead := self._ahead.pop(number, None)) is not None:
            self._router.started(*ahead, when)

    def _apply_changes(self, reported: list[tuple[str, Changes]]) -> None:
        for name, changes in reported:
            if changes.restart:
                self._router.cleared(name)
            self._router.evicted(name, changes.evicted)
            self._router.stored(name, changes.stored)

    def check_integrity(self, **_: Any) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        self._router.check_integrity()
