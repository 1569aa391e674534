"""`hypercorn aengine.app:app`: the server as an ASGI application.

Importing this module loads neither torch nor a model. The model is loaded by a task that starts with the server;
until it is done `/ready` says 503, because a server that did not answer for a minute would be given up by hypercorn.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import anyio
import anyio.to_thread
from starlette.types import Receive, Scope, Send

from aengine.config import EngineConfig, ServerConfig
from aengine.config.configure import check_names, configure
from aengine.errors import AengineError, ConfigError, EngineFailedError, EngineNotReadyError
from aengine.http import EngineLike, InFlight, ServerState, http_app
from aengine.http.door.errors import error_response
from aengine.http.hypercorn.install import install
from aengine.http.hypercorn.receiving import Receiving
from aengine.http.hypercorn.traced import TracedSends
from aengine.http.hypercorn.workers import only_worker
from aengine.process.standard_streams import lossy_streams

_UNKNOWN_CALLS = (
    "tools: this chat template's way to write calls is not known, so that calls stay text and tool_choice cannot force "
    "them; the knob tool_format (--tool-format) names it"
)

_NO_PLACE_FOR_TOOLS = "tools: the chat template has no place for them, so that requests with tools are refused"

EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[EngineLike]]


def create_app(
    config: EngineConfig | None = None,
    server: ServerConfig | None = None,
    engine_factory: EngineFactory | None = None,
) -> Application:
    """An ASGI application that owns one engine for as long as its lifespan.

    What is None is read from `AENGINE_*` variables when the server starts. `engine_factory` makes the engine; the
    default is `aengine.Engine`.
    """
    return Application(config, server, engine_factory)


class Application:
    """The ASGI application: runs the engine during its lifespan, and leaves requests to `aengine.http`.

    `settled`: the engine is ready, or has failed to be. `failed`: there is none and will be none, `failure` says why.
    `announces`: whether this prints `ready_text`, the names and the seconds that it took.
    """

    def __init__(
        self, config: EngineConfig | None, server: ServerConfig | None, engine_factory: EngineFactory | None
    ) -> None:
        self._config = config
        self._server = server
        self._engine_factory = engine_factory
        self._http: InFlight | None = None
        self._state: ServerState | None = None
        self.settled = asyncio.Event()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self.ready_text = ""
        self.announces = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            with lossy_streams():
                await self._lifespan(receive, send)
        elif self._http is not None:
            await self._http(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(EngineNotReadyError("the server has not been started"))(scope, receive, send)

    async def drain(self) -> None:
        """Answer new work with 503, and wait until running requests have ended."""
        if self._state is not None:
            self._state.draining()
        if self._http is not None:
            await self._http.idle()

    def cut_off(self) -> None:
        """End what still runs; streams end with an error event."""
        if self._http is not None:
            self._http.cut_off()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        install(asyncio.get_running_loop())
        _configure_logging()
        try:
            config = self._config or configure(EngineConfig)
            state = self._state = ServerState(self._server or configure(ServerConfig))
            check_names(config, state.config)
            with only_worker():
                self._http = state.in_flight = InFlight(Receiving(http_app(state)))
                async with anyio.create_task_group() as tasks:
                    closing = anyio.Event()
                    tasks.start_soon(self._run_engine, config, state, closing)
                    watching = await tasks.start(state.loop_delay.watch)
                    reading = await tasks.start(self._http.watch_readers, state.config.stalled_reader_timeout)
                    await send({"type": "lifespan.startup.complete"})
                    await receive()  # lifespan.shutdown
                    if not self.settled.is_set():
                        tasks.cancel_scope.cancel()  # still loading
                    watching.cancel()
                    reading.cancel()
                    closing.set()
        except ConfigError as error:
            await _exit_with_reason(str(error), send)
        await send({"type": "lifespan.shutdown.complete"})

    async def _run_engine(self, config: EngineConfig, state: ServerState, closing: anyio.Event) -> None:
        """Load the engine, keep it until `closing`, close it: all in one task, as its own task group demands."""
        begin = time.perf_counter()
        try:
            make_engine = self._engine_factory
            if make_engine is None:
                make_engine = await anyio.to_thread.run_sync(_default_factory)
            async with make_engine(config) as engine:
                if engine.timeline is not None and self._http is not None:
                    self._http.app = TracedSends(self._http.app, engine.timeline)
                _freeze_garbage()
                state.ready(engine)
                if engine.answer_format.unknown_calls and state.config.tool_format == "auto":
                    _print(_UNKNOWN_CALLS)
                if not engine.answer_format.sees_tools:
                    _print(_NO_PLACE_FOR_TOOLS)
                name, *others = state.model_names
                aliases = f", also called {' and '.join(others)}," if others else ""
                self.ready_text = f"{name}{aliases} is ready after {time.perf_counter() - begin:.1f} s"
                if self.announces:
                    _print(self.ready_text)
                self.settled.set()
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._watch_engine, engine, state)
                        await closing.wait()
                        tasks.cancel_scope.cancel()
                finally:
                    state.stopping()
        except Exception as error:  # noqa: BLE001 - whatever it was, the server says so instead of dying silently
            self._fail(error, state)
            self.settled.set()

    async def _watch_engine(self, engine: EngineLike, state: ServerState) -> None:
        """Wait until the engine fails, and let every request from then on be answered with the reason."""
        await engine.failed.wait()
        self._fail(engine.failure or EngineFailedError("the engine is over"), state)

    def _fail(self, error: BaseException, state: ServerState) -> None:
        happened = "could not be started" if state.phase == "loading" else "failed"
        state.failed(error)
        self.failure = error
        if isinstance(error, AengineError):
            _print(f"the engine {happened}: {error}")
        else:
            _print(f"the engine {happened}:")
            traceback.print_exception(error)
        self.failed.set()


def _freeze_garbage() -> None:
    """Collect once and freeze: what is loaded stays for good, and a collection that looked through it would hold the
    loop for 0.1 s now and then.
    """
    gc.collect()
    gc.freeze()


def _default_factory() -> EngineFactory:
    from aengine.engine import Engine  # brings the tokenizers, hence in a thread

    return lambda config: Engine(config=config)


async def _exit_with_reason(reason: str, send: Send) -> None:
    """End the process with exit status 1: a message for the ASGI server, one sentence on standard error."""
    with suppress(Exception):  # hypercorn raises here, and would print the traceback of that
        await send({"type": "lifespan.startup.failed", "message": reason})
    if (task := asyncio.current_task()) is not None:
        task.add_done_callback(asyncio.Task.exception)  # looked at: asyncio need not report it as lost
    raise SystemExit(f"aengine: {reason}")


def _configure_logging() -> None:
    """Write the engine's log lines to the terminal, unless the process has set up logging of its own."""
    log = logging.getLogger("aengine")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("aengine: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _print(text: str) -> None:
    print(f"aengine: {text}", file=sys.stderr, flush=True)


app = create_app()
