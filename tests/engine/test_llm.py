"""`LLM`, the engine for programs without asyncio: nothing hangs, however a call or the object ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aengine
from aengine import EngineClosedError, InvalidRequestError, QueueFullError, SamplingParams
from aengine.engine import llm as llm_module
from aengine.engine.llm import LLM
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime

KNOBS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "kv_cache_gib": 0.1, "progress": False}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
ENDLESS = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
PROMPTS = [[300 + number, 301, 302] for number in range(20)]
CHAT = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def shared(demo: None) -> Iterator[LLM]:
    with LLM(**KNOBS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One for the module. After each test, nothing runs in it and it still answers."""
    yield shared
    until(lambda: not shared._engine.stats().running and not shared._engine.stats().waiting)
    shared._engine.check_integrity()
    assert len(shared.generate("x", max_tokens=1)) == 1


def until(holds: Callable[[], object]) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < 30
        time.sleep(0.001)


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """A shell starts background processes with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(holds: Callable[[], object]) -> None:
    """Send Ctrl-C to the main thread once the condition holds."""

    def watch() -> None:
        until(holds)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()


@pytest.mark.anyio
async def test_completions_are_the_engines_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Call it inside a running loop, as in a notebook."""
    found = llm.generate(PROMPTS, **GREEDY)
    async with aengine.Engine(**KNOBS) as engine:
        expected = [await engine.complete(prompt, **GREEDY) for prompt in PROMPTS]
        chat = await engine.chat(CHAT, **GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.token_ids for one in llm.chat(CHAT, **GREEDY)] == [chat.token_ids]
    assert [one.token_ids for one in llm.chat([CHAT, CHAT], **GREEDY)] == [chat.token_ids] * 2


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("text", 1), (["text"], 1), ([300, 301], 1), ([[300, 301]], 1), (["text", [300]], 2), ([], 0), ((300, 301), 1)],
)
def test_a_prompt_or_several(prompts: Any, count: int, llm: LLM) -> None:
    assert len(llm.generate(prompts, **GREEDY)) == count


def test_parameters_for_all_or_for_each(llm: LLM) -> None:
    few, many = SamplingParams(max_tokens=1, temperature=0), SamplingParams(max_tokens=3, ignore_eos=True)
    assert [one.usage.completion_tokens for one in llm.generate(PROMPTS[:2], few)] == [1, 1]
    assert [one.usage.completion_tokens for one in llm.generate(PROMPTS[:2], [few, many])] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 are given for 3 prompts"):
        llm.generate(PROMPTS[:3], [few, many])


def test_one_bad_prompt_ends_the_others_and_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="token ids are integers") as caught:
        llm.generate([*PROMPTS[:3], [10**9], *PROMPTS[3:]], **ENDLESS)
    assert caught.value.__notes__ == ["in prompt 3 of 21, counted from 0"]


def test_several_threads_at_once(llm: LLM) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(llm.generate(PROMPTS, **GREEDY)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [20] * 4


def test_a_full_queue_is_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, refusals = llm._engine.complete, [QueueFullError("full", retry_after=0.001)] * 3

    async def refusing(*args: Any, **options: Any) -> aengine.Completion:
        if refusals:
            raise refusals.pop()
        return await complete(*args, **options)

    monkeypatch.setattr(llm._engine, "complete", refusing)
    assert len(llm.generate(PROMPTS, **GREEDY)) == 20
    assert not refusals


def test_a_full_queue_is_refused(demo: None) -> None:
    with LLM(**KNOBS | {"max_queue": 0}) as llm, pytest.raises(QueueFullError, match="the bound is 0"):
        llm.generate(PROMPTS)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_call_and_its_requests(llm: LLM) -> None:
    interrupt_when(lambda: llm._engine.stats().running > 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, **ENDLESS)


def test_ctrl_c_before_the_start_of_a_call_returns_ends_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests run already while the caller's thread is still in the call that starts them."""
    call_soon, stats = llm._loop.call_soon_threadsafe, llm._engine.stats
    before = stats().generated_tokens

    def start_and_interrupt(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        call_soon(*args, **options)
        until(lambda: stats().running > 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._loop, "call_soon_threadsafe", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, **ENDLESS)
    until(lambda: not stats().running and not stats().waiting)
    assert stats().generated_tokens - before < len(PROMPTS) * ENDLESS["max_tokens"]


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_the_model_is_loaded_gives_its_memory_back(demo: None) -> None:
    begun, go_on = threading.Event(), threading.Event()
    closed: list[Runtime] = []

    def start(config: Any, folder: Any, model: ModelConfig, begin_text: Any) -> Runtime:
        runtime = start_runtime(config, folder, model, begin_text)
        close = runtime.runner.close
        runtime.runner.close = lambda: (closed.append(runtime), close())  # type: ignore[method-assign,assignment,func-returns-value]
        begun.set()
        assert go_on.wait(30)
        return runtime

    interrupt_when(begun.is_set)
    with pytest.raises(KeyboardInterrupt):
        LLM(**KNOBS, start=start)
    go_on.set()
    until(lambda: closed)


def test_what_keeps_the_model_from_loading_is_raised() -> None:
    with pytest.raises(aengine.AengineError, match="/nonexistent"):
        LLM("/nonexistent/model", **KNOBS)
    with pytest.raises(aengine.ConfigError, match="unheard_of"):
        LLM(unheard_of=1)


def test_closed_it_says_so(demo: None) -> None:
    llm = LLM(**KNOBS)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            llm.generate(PROMPTS, **ENDLESS)
        except EngineClosedError as error:
            failed.append(error)

    waits = threading.Thread(target=run)
    waits.start()
    until(lambda: llm._engine.stats().running)
    llm.close()
    llm.close()
    waits.join(30)
    assert len(failed) == 1
    for call in (lambda: llm.generate("x"), lambda: llm.chat(CHAT)):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()


def test_forgotten_it_is_closed(demo: None) -> None:
    llm = LLM(**KNOBS)
    llm.generate("x", max_tokens=1)
    thread, engine = llm._thread, weakref.ref(llm._engine)
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_a_bar_is_shown_after_a_while(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(PROMPTS[:2], max_tokens=1, progress=True)
    assert capsys.readouterr().err == ""  # it took less than two seconds
    monkeypatch.setattr(llm_module, "BAR_SECONDS", 0.01)
    llm.generate(PROMPTS, max_tokens=20, ignore_eos=True)
    assert capsys.readouterr().err == ""  # stderr is not a terminal
    llm.generate(PROMPTS, max_tokens=100, ignore_eos=True, progress=True)  # tqdm needs more than 0.1 s
    shown = capsys.readouterr().err
    assert "0/20" in shown  # before the first one is done
    assert "20/20" in shown
    assert "2000 tokens" in shown


@pytest.mark.slow
def test_a_program_that_never_closes_it_ends_in_silence() -> None:
    code = "import aengine\nllm = aengine.LLM(device='cpu', kv_cache_gib=0.1, progress=False)\n"
    code += "print(len(llm.generate(['a', 'b'], max_tokens=2)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
