"""`hypercorn aengine.app:app`: the server as an ASGI application.

Importing this module loads neither torch nor a model. A task that starts with the server loads the model. Until then
`/ready` answers 503: hypercorn stops a server whose start-up takes longer than a minute.
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
from aengine.http.entry.errors import error_response
from aengine.http.hypercorn.install import install
from aengine.http.hypercorn.receiving import Receiving
from aengine.http.hypercorn.traced import TracedSends
from aengine.http.hypercorn.workers import only_worker
from aengine.process.standard_streams import lossy_streams

_UNKNOWN_CALLS = (
    "tools: the format of this chat template's tool calls is unknown, so calls stay text and tool_choice cannot "
    "force them; set the knob tool_format (--tool-format)"
)

_NO_PLACE_FOR_TOOLS = "tools: the chat template does not use them, so that requests with tools are refused"

EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[EngineLike]]


def create_app(
    config: EngineConfig | None = None,
    server: ServerConfig | None = None,
    engine_factory: EngineFactory | None = None,
) -> Application:
    """Return an ASGI application that owns one engine during its lifespan.

    config, server: None means that they are read from `AENGINE_*` variables when the server starts.
    engine_factory: makes the engine; the default is `aengine.Engine`.
    """
    return Application(config, server, engine_factory)


class Application:
    """The ASGI application. It runs the engine during its lifespan; `aengine.http` answers requests.

    settled: set when the engine is ready or could not be started.
    failed: set when the engine could not be started or has failed; `failure` is the reason.
    announces: whether the application prints `ready_text`, with the model's names and the seconds that loading took.
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
        """Answer new requests with 503, and wait until running ones have ended."""
        if self._state is not None:
            self._state.mark_draining()
        if self._http is not None:
            await self._http.idle()

    def cut_off(self) -> None:
        """End running requests. Streams end with an error event."""
        if self._http is not None:
            self._http.cancel_all()

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
        """Load the engine, keep it until `closing`, and close it. All of this must happen in one task."""
        begin = time.perf_counter()
        try:
            make_engine = self._engine_factory
            if make_engine is None:
                make_engine = await anyio.to_thread.run_sync(_default_factory)
            async with make_engine(config) as engine:
                if engine.timeline is not None and self._http is not None:
                    self._http.app = TracedSends(self._http.app, engine.timeline)
                _freeze_garbage()
                state.mark_ready(engine)
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
                    state.mark_stopping()
        except Exception as error:  # noqa: BLE001 - the server reports any error instead of ending silently
            self._fail(error, state)
            self.settled.set()

    async def _watch_engine(self, engine: EngineLike, state: ServerState) -> None:
        """Wait until the engine fails; every later request is then answered with the reason."""
        await engine.failed.wait()
        self._fail(engine.failure or EngineFailedError("the engine has ended"), state)

    def _fail(self, error: BaseException, state: ServerState) -> None:
        happened = "could not be started" if state.phase == "loading" else "failed"
        state.mark_failed(error)
        self.failure = error
        if isinstance(error, AengineError):
            _print(f"the engine {happened}: {error}")
        else:
            _print(f"the engine {happened}:")
            traceback.print_exception(error)
        self.failed.set()


def _freeze_garbage() -> None:
    """Collect garbage once, and exclude the loaded objects from later collections.

    A collection that walks over them would block the loop for 0.1 s now and then.
    """
    gc.collect()
    gc.freeze()


def _default_factory() -> EngineFactory:
    from aengine.engine import Engine  # brings the tokenizers, hence in a thread

    return lambda config: Engine(config=config)


async def _exit_with_reason(reason: str, send: Send) -> None:
    """End the process with exit status 1: a message for the ASGI server, one sentence on standard error."""
    with suppress(Exception):  # hypercorn raises here, and would print a traceback
        await send({"type": "lifespan.startup.failed", "message": reason})
    if (task := asyncio.current_task()) is not None:
        task.add_done_callback(asyncio.Task.exception)  # so that asyncio does not report it as never retrieved
    raise SystemExit(f"aengine: {reason}")


def _configure_logging() -> None:
    """Write the engine's log lines to standard error, unless the process has set up logging itself."""
    log = logging.getLogger("aengine")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("aengine: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _print(text: str) -> None:
    print(f"aengine: {text}", file=sys.stderr, flush=True)


app = create_app()
