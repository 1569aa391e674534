"""The public async API: requests go in, fragments of text come out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio
import anyio.abc
import anyio.to_thread

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.engine.facts import EngineFacts
from aengine.engine.generation import Generation
from aengine.engine.kv_events import Publisher, published_events
from aengine.engine.loaded import Loaded, load
from aengine.engine.loop import StepLoop
from aengine.engine.pooled_answers import PooledAnswers, Routing
from aengine.engine.requests.live import LiveChoice, LiveRequest
from aengine.engine.requests.pooled import PooledPrompt, PooledRequest
from aengine.engine.requests.stream import Stream
from aengine.engine.sleep import Sleeping, to_the_end
from aengine.engine.stats import snapshot
from aengine.errors import (
    AengineError,
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
)
from aengine.latency import Latencies
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.step_plan import Pool, StepPlan
from aengine.text.grammar.grammars import Matcher
from aengine.timeline import Timeline
from aengine.types import Stats

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.runtime.startup.start import Start

log = logging.getLogger("aengine")

_NOT_ENTERED = (
    "the engine has not been started: use it as `async with aengine.Engine(...) as engine: ...`; programs without "
    "asyncio use aengine.LLM(...)"
)


class Engine(EngineFacts, Generation, PooledAnswers, Sleeping):
    """An LLM on one device, used as `async with Engine(...) as engine`.

    The knobs are those of `EngineConfig`, given one by one or as `config=`; `AENGINE_*` variables fill in
    what is not given. `start` makes the runtime: tests and benchmarks put their own in `start_runtime`'s place.
    Entering loads the model; leaving ends what still runs with `EngineClosedError`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        start: Start | None = None,
        **knobs: Any,
    ) -> None:
        if config is not None and (knobs or model is not None):
            raise ConfigError("give either config= or single knobs, not both")
        if model is not None:
            knobs["model"] = str(model)
        self.config = config if config is not None else configure(EngineConfig, **knobs)
        Sleeping.__init__(self, self.config.max_queue)
        self._start = start
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()  # set once `failure` tells why nothing is served any more
        self.latencies = Latencies()
        self.timeline: Timeline | None = None  # there once the engine is entered, where it was asked for
        self.created = 0  # unix seconds when the engine became ready
        self._ready_state: Loaded | None = None
        self._closed = False
        self._loop: StepLoop | None = None
        self._home: asyncio.AbstractEventLoop | None = None  # whose tasks may use the engine
        self._requests: dict[str, LiveRequest | PooledRequest] = {}
        self._tickets = itertools.count()
        self._ended_requests = 0
        self._stopped = anyio.Event()
        self._exit = AsyncExitStack()

    # ---- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise EngineClosedError("an Engine can be entered once; make a new one")
        self._home = asyncio.get_running_loop()
        publisher = None if self.config.kv_events is None else Publisher(self.config)
        loaded: list[Loaded] = []
        cancelled: asyncio.CancelledError | None = None
        try:
            await to_the_end(lambda: loaded.append(load(self.config, self._start)))
        except asyncio.CancelledError as error:
            cancelled = error  # what has been loaded is closed below
        except BaseException:
            if publisher is not None:
                publisher.close()
            raise
        [ready] = loaded
        self.timeline = ready.timeline
        self._loop = StepLoop(
            ready.scheduler,
            ready.runtime.runner,
            lookahead=self.config.lookahead,
            fill_masks=ready.grammars.fill,
            prepare_mask=ready.grammars.prepare,
            fail_request=self._fail_request,
            timeline=self.timeline,
            between=ready.look,
            observe=partial(self._observe_step, ready),
        )
        group = await self._exit.enter_async_context(anyio.create_task_group())
        group.start_soon(self._serve, self._loop, ready)
        if ready.adapters is not None:
            group.start_soon(ready.adapters.carry, self._loop.wake, self._fail_sequence)
        if ready.carriers is not None:
            group.start_soon(ready.carriers.carry, self._loop.wake)
        try:
            events = published_events(self.config, ready.scheduler.memory.tree, publisher)
            await self._exit.enter_async_context(events)
            if cancelled is not None:
                raise cancelled
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._ready_state = ready
        self.created = int(time.time())
        return self

    def __enter__(self) -> NoReturn:
        raise TypeError(_NOT_ENTERED)

    def __exit__(self, *_: object) -> None: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for request in list(self._requests.values()):
            self._fail_request(request, EngineClosedError("the engine was closed"))
        if self._loop is not None:
            self._loop.stop()
            with anyio.CancelScope(shield=True):
                await self._stopped.wait()  # the last step has landed, the tensors may go
        # The group is empty, so the body's own exception passes as it is instead of in a group.
        await self._exit.__aexit__(None, None, None)

    async def _serve(self, loop: StepLoop, ready: Loaded) -> None:
        """The engine task: runs the step loop to its end; nothing escapes from it, every waiter hears of its end."""
        with anyio.CancelScope(shield=True):
            try:
                await loop.run()
            except Exception as error:  # a bug or a dead device: hand it to everyone who waits
                log.critical("the engine failed", exc_info=error)
                self.failure = error
                failure = EngineFailedError(f"the engine failed: {type(error).__name__}")
                failure.__cause__ = error
                for request in list(self._requests.values()):
                    request.fail(failure)  # the scheduler is not asked: it may be what failed
                self.failed.set()
            finally:
                try:
                    async with self._changing:  # what is being copied to the device ends first
                        if ready.adapters is not None:
                            await ready.adapters.close()
                        if ready.carriers is not None:
                            await ready.carriers.close()
                        await anyio.to_thread.run_sync(ready.runtime.close)
                except Exception as error:  # a dead device: whoever leaves must not wait for it
                    log.error("the device did not let go cleanly", exc_info=error)
                finally:
                    ready.grammars.close()
                    self._close_timeline()
                    self._stopped.set()

    def _close_timeline(self) -> None:
        if self.timeline is not None:
            try:
                self.timeline.close()
            except RuntimeError as error:  # a dead device cannot tell when it was busy
                log.error("the timeline could not be completed", exc_info=error)

    def _observe_step(self, ready: Loaded, plan: StepPlan, seconds: float) -> None:
        self.latencies.step_tokens.observe(plan.num_tokens)
        if ready.carriers is not None:
            ready.carriers.observe(plan, seconds)

    # ---- requests -----------------------------------------------------------------------------------------

    def _enqueue(
        self,
        token_ids: list[int],
        params: SamplingParams,
        grammar: Matcher | None,
        banned: tuple[tuple[int, ...], ...],
        request_id: str | None,
        priority: int,
        salt: str | None,
        adapter: str | None,
    ) -> Stream:
        ready = self._serving()  # tokenizing and compiling may have taken a while
        loaded = ready.adapter(adapter)
        request_id = self._unused_id(request_id)
        rank = self._rank(priority)
        sequence = ready.sequence(
            token_ids, params, grammar=grammar, banned=banned, rank=rank, salt=salt, adapter=loaded
        )
        request = LiveRequest(request_id, sequence, grammar, ready.tokenizer, self._abort, self._forget, self.latencies)
        ready.scheduler.add(sequence)
        self._begin(request)
        return request.stream

    def _enqueue_pooled(
        self, prompts: Sequence[list[int]], pool: Pool, request_id: str | None, routing: Routing
    ) -> PooledRequest:
        ready = self._serving()  # tokenizing may have taken a while
        request_id = self._unused_id(request_id)
        loaded = ready.adapter(routing.adapter)
        sequences = [
            ready.pooled_sequence(ids, pool, rank=self._rank(routing.priority), salt=routing.cache_salt, adapter=loaded)
            for ids in prompts
        ]
        request = PooledRequest(request_id, sequences, self._forget, self.latencies)
        ready.scheduler.add_pooled(sequences)
        self._begin(request)
        return request

    def _unused_id(self, request_id: str | None) -> str:
        request_id = request_id or secrets.token_hex(12)
        if request_id in self._requests:
            raise InvalidRequestError(f"a request with the id {request_id!r} is already running", "request_id")
        return request_id

    def _rank(self, priority: int) -> tuple[float, int]:
        """The next place in the queue."""
        return time.monotonic() + priority * self.config.priority_aging, next(self._tickets)

    def _begin(self, request: LiveRequest | PooledRequest) -> None:
        self._requests[request.id] = request
        if self._loop is not None:
            self._loop.wake()

    def abort(self, request_id: str) -> bool:
        """End a request now and give its memory back; its stream ends with `finish_reason="abort"`.

        False if no such request is running.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._abort(request)
        return True

    def _abort(self, request: LiveRequest | PooledRequest) -> None:
        if request.ended:
            return
        self._end_sequences(request)
        request.abort()

    def _fail_request(self, request: LiveRequest | PooledRequest, error: AengineError) -> None:
        """End a request with an error, in every choice or prompt."""
        self._end_sequences(request)
        request.fail(error)

    def _fail_sequence(self, sequence: TokenSequence, error: AengineError) -> None:
        """End the request that a sequence belongs to with an error."""
        if isinstance(sequence.owner, (LiveChoice, PooledPrompt)):
            self._fail_request(sequence.owner.request, error)

    def _end_sequences(self, request: LiveRequest | PooledRequest) -> None:
        ready = self._ready()
        for sequence in request.sequences:
            ready.scheduler.abort(sequence)
        if ready.adapters is not None and self._loop is not None:
            self._loop.wake()  # someone may wait until nobody has the adapter

    def _forget(self, request: LiveRequest | PooledRequest) -> None:
        del self._requests[request.id]
        self._ended_requests += 1
        if not self._requests:
            self._emptied.set()

    # ---- its state ----------------------------------------------------------------------------------------

    def _ready(self) -> Loaded:
        if self._home is None:
            raise EngineNotReadyError(_NOT_ENTERED)
        if self._ready_state is None:
            raise EngineNotReadyError("the engine is still loading")
        return self._ready_state

    def _serving(self) -> Loaded:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.failure is not None:
            raise EngineFailedError(f"the engine failed: {type(self.failure).__name__}")
        ready = self._ready()
        if asyncio.get_running_loop() is not self._home:  # nothing would ever wake the consumer
            raise InvalidRequestError("the engine serves the event loop that it was entered on, and no other")
        return ready

    def stats(self) -> Stats:
        """A snapshot; cheap."""
        last_step = None if self._loop is None else self._loop.last_step
        return snapshot(self._ready(), self._ended_requests, last_step)
