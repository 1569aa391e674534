"""`LLM`: an engine for programs and notebooks without asyncio."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import anyio
from tqdm import tqdm

from aengine.config import EngineConfig
from aengine.engine.engine import Engine
from aengine.engine.requests.arguments import prompt_list
from aengine.errors import AengineError, EngineClosedError, InvalidRequestError, QueueFullError
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion

BAR_SECONDS = 2.0  # a call shows a progress bar after this time, and refreshes it at least this often
_CLOSED = "this LLM is closed; make a new one"

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Job = Callable[[], Awaitable[Completion]]


class LLM:
    """An `Engine` whose methods block: `LLM(...).generate(["The capital of France is"], max_tokens=20)`.

    Arguments are those of `Engine`. The constructor loads the model. `close`, or the end of a `with` block, frees its
    memory. Several threads may call methods at once. Ctrl-C ends the waiting call and aborts its requests. The model
    stays loaded.

    The engine's event loop runs in a separate thread. It cannot run in the caller's thread, because the engine's tasks
    also run between calls. In a notebook the caller's thread already runs a loop.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **knobs: Any) -> None:
        self._engine = Engine(model, config=config, **knobs)
        self._loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        ready: Future[None] = Future()
        run = partial(_run_engine, self._engine, self._loop, ready, stop)
        self._thread = threading.Thread(target=run, name="aengine", daemon=True)
        # This also runs when the object is garbage collected. At the end of the process the daemon thread just ends.
        self._stop = weakref.finalize(self, _stop_engine, self._loop, stop)
        self._stop.atexit = False
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End running calls with `EngineClosedError`, and free the memory. Idempotent."""
        self._stop()
        self._thread.join()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool | None = None, **options: Any
    ) -> list[Completion]:
        """Return one completion for each prompt, in the order of the prompts.

        Args:
            prompts: each is text or token ids; a single prompt gives a list of one completion.
            params: one `SamplingParams` for all prompts, or a list with one for each prompt.
            progress: whether a bar is shown after two seconds. None: it is shown on a terminal and in notebooks, if the
                knob `progress` is on.
            options: those of `Engine.submit`, for all prompts.

        If a prompt fails, the method raises its error and aborts all other prompts.
        """
        return self._answer(self._engine.complete, prompt_list(prompts, bounded=False), params, progress, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the assistant's next message in each chat: one completion for each, in their order.

        messages: one chat, or a list of chats. options: those of `Engine.submit_chat`, for all chats. The other
            arguments are as in `generate`.
        """
        chats: list[Any] = list(messages)
        if not chats or isinstance(chats[0], Mapping):
            chats = [chats]
        return self._answer(self._engine.chat, chats, params, progress, options)

    def _answer(
        self,
        answer: Callable[..., Awaitable[Completion]],
        prompts: Sequence[object],
        params: Params,
        progress: bool | None,
        options: Mapping[str, Any],
    ) -> list[Completion]:
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)  # type: ignore[list-item]  # None for each
        elif len(params) != len(prompts):
            raise InvalidRequestError(f"params: {len(params)} are given for {len(prompts)} prompts", "params")
        jobs = [partial(answer, prompt, own, **options) for prompt, own in zip(prompts, params)]
        return self._run(jobs, self._shows_progress() if progress is None else progress)

    def _shows_progress(self) -> bool:
        return self._engine.config.progress and (sys.stderr.isatty() or "ipykernel" in sys.modules)

    def _run(self, jobs: Sequence[Job], progress: bool) -> list[Completion]:
        """Run the jobs on the engine's loop. This thread waits for them and shows the bar.

        The loop makes and keeps the task, and this method always cancels it at the end. So Ctrl-C cannot leave jobs
        running, even if it comes while they are started.
        """
        done: SimpleQueue[Completion | None] = SimpleQueue()  # None: all jobs are done, or one has failed
        config = self._engine.config
        tasks: list[asyncio.Task[list[Completion]]] = []  # the one task, once it is made

        def start() -> None:
            work = _do_all(jobs, min(config.max_num_seqs, config.max_queue), done.put)
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: done.put(None))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        tokens = 0
        try:
            if not self._call_soon(start):
                raise EngineClosedError(_CLOSED)
            with tqdm(total=len(jobs), unit=" prompts", delay=BAR_SECONDS, disable=not progress) as bar:
                while (completion := self._next(done, bar)) is not None:
                    tokens += completion.usage.completion_tokens
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                    bar.update()
            return tasks[0].result()
        except asyncio.CancelledError:
            raise EngineClosedError(_CLOSED) from None
        finally:
            self._call_soon(cancel)  # has an effect only if this thread was interrupted

    def _call_soon(self, callback: Callable[[], None]) -> bool:
        """Call back in the engine's loop. Returns False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def _next(self, done: SimpleQueue[Completion | None], bar: tqdm[Any]) -> Completion | None:
        """Wait for the next completion. Raises `EngineClosedError` if the engine's thread has ended."""
        while True:
            try:
                return done.get(timeout=BAR_SECONDS)
            except Empty:
                bar.refresh()
                if not self._thread.is_alive():
                    raise EngineClosedError(_CLOSED) from None


def _run_engine(engine: Engine, loop: asyncio.AbstractEventLoop, ready: Future[None], stop: asyncio.Event) -> None:
    """Run the engine until `stop` is set. Called in an `LLM`'s thread. If the start fails, `ready` gets the error."""

    async def serve() -> None:
        async with engine:
            ready.set_result(None)
            await stop.wait()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            runner.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)


def _stop_engine(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the thread has ended already
        loop.call_soon_threadsafe(stop.set)


async def _do_all(jobs: Sequence[Job], concurrency: int, done: Callable[[Completion], None]) -> list[Completion]:
    """Return the results of all jobs, in their order. The first error cancels the other jobs and is raised.

    concurrency: how many jobs run at once. 0: the engine's queue has no space, so the first job raises QueueFullError.
    """
    results: dict[int, Completion] = {}
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for number, job in waiting:  # each job goes to one worker
            try:
                results[number] = await (_retry_while_full(job) if concurrency else job())
            except AengineError as error:
                error.add_note(f"in prompt {number} of {len(jobs)}, counted from 0")
                raise
            done(results[number])

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(max(concurrency, 1), len(jobs))):
                tasks.start_soon(work)
    except BaseExceptionGroup as group:
        raise _first(group) from None
    return [results[number] for number in range(len(jobs))]


async def _retry_while_full(job: Job) -> Completion:
    """Run a job. Retry it while other callers fill the engine's queue."""
    while True:
        try:
            return await job()
        except QueueFullError as error:
            await anyio.sleep(error.retry_after)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
