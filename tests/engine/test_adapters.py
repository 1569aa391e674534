"""Adapters through the public API: chosen by name, loaded and unloaded while streams run, more of them than places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aengine
from aengine.errors import (
    AdapterError,
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    HubError,
    InvalidRequestError,
    ModelNotFoundError,
)
from aengine.runtime.adapters import AdapterPlaces
from tests.engine.adapters import GREEDY, PROMPT, Written, serving
from tests.engine.conftest import idle

pytestmark = pytest.mark.anyio


COUNT = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("adapters"), COUNT)


@pytest.fixture(scope="module")
def alone(written: Written) -> dict[str | None, tuple[int, ...]]:
    """The ids that each adapter, and the model alone, draws after `PROMPT` without other requests."""

    async def draw() -> dict[str | None, tuple[int, ...]]:
        async with serving(lora=written.paths, prefix_cache=False, lookahead=False) as engine:
            names = [None, *written.paths]
            return {name: (await engine.complete(PROMPT, adapter=name, **GREEDY)).token_ids for name in names}

    return asyncio.run(draw())


@pytest.fixture
async def engine(written: Written) -> AsyncIterator[aengine.Engine]:
    """An engine with two loaded adapters and room for three."""
    lora = {name: written.paths[name] for name in ("a0", "a1")}
    async with serving(lora=lora, lora_loading=True, max_loras=3) as engine:
        yield engine


# ---- by name --------------------------------------------------------------------------------------------------


async def test_an_adapter_draws_what_peft_has_merged(engine: aengine.Engine, written: Written) -> None:
    adapted = await engine.complete(PROMPT, adapter="a0", **GREEDY)
    assert list(adapted.token_ids) == written.greedy(written.merged, PROMPT, 12)
    plain = await engine.complete(PROMPT, **GREEDY)
    assert list(plain.token_ids) == written.greedy(written.base, PROMPT, 12)


def test_adapters_draw_different_ids(alone: dict[str | None, tuple[int, ...]]) -> None:
    assert len(set(alone.values())) == COUNT + 1


@pytest.mark.slow
async def test_each_request_of_a_batch_has_its_own(alone: dict[str | None, tuple[int, ...]], written: Written) -> None:
    names = [None, *written.paths] * 3
    async with serving(lora=written.paths, max_loras=8) as engine:
        got = await asyncio.gather(*(engine.complete(PROMPT, adapter=name, **GREEDY) for name in names))
    assert [one.token_ids for one in got] == [alone[name] for name in names]


async def test_by_every_way_of_asking(engine: aengine.Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = await engine.chat(messages, adapter="a1", **GREEDY)
    streamed = [one async for one in engine.chat_stream(messages, adapter="a1", **GREEDY)]
    assert tuple(token for one in streamed for token in one.token_ids) == chat.token_ids
    assert (await engine.chat(messages, **GREEDY)).token_ids != chat.token_ids
    generated = [one async for one in engine.generate(PROMPT, adapter="a1", **GREEDY)]
    whole = await engine.complete(PROMPT, adapter="a1", **GREEDY)
    assert tuple(token for one in generated for token in one.token_ids) == whole.token_ids


async def test_an_unknown_name_is_refused_at_once(engine: aengine.Engine) -> None:
    for adapter in ("a9", ""):
        with pytest.raises(ModelNotFoundError):
            await engine.complete(PROMPT, adapter=adapter)
        with pytest.raises(ModelNotFoundError):
            await engine.chat([{"role": "user", "content": "hi"}], adapter=adapter)
    with pytest.raises(InvalidRequestError, match="adapter"):
        await engine.complete(PROMPT, adapter=3)


async def test_without_room_for_adapters_there_are_none(written: Written) -> None:
    async with serving() as engine:
        assert engine.adapters == []
        with pytest.raises(ModelNotFoundError, match="no room"):
            await engine.complete(PROMPT, adapter="a0")
        with pytest.raises(ConfigError, match="lora_loading"):
            await engine.load_adapter("a0", written.paths["a0"])


async def test_they_are_listed_with_what_they_take(engine: aengine.Engine, written: Written) -> None:
    listed = {one.name: one for one in engine.adapters}
    assert [*listed] == ["a0", "a1"]
    assert listed["a0"].path == written.paths["a0"]
    assert listed["a0"].rank == 4
    assert listed["a0"].bytes > 10_000
    await engine.complete(PROMPT, adapter="a1", **GREEDY)
    assert engine.adapters[1].on_device


# ---- loading and unloading ------------------------------------------------------------------------------------


async def test_one_is_loaded_and_unloaded_during_a_stream(
    engine: aengine.Engine, written: Written, alone: dict[str | None, tuple[int, ...]]
) -> None:
    expected = await engine.complete(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 80})
    running = asyncio.create_task(engine.complete(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 80}))
    for _ in range(2):
        for name in ("a2", "a3"):
            await engine.load_adapter(name, written.paths[name])
            assert (await engine.complete(PROMPT, adapter=name, **GREEDY)).token_ids == alone[name]
            await engine.unload_adapter(name)
            with pytest.raises(ModelNotFoundError):
                await engine.complete(PROMPT, adapter=name)
    assert (await running).token_ids == expected.token_ids


async def test_unloading_waits_for_its_requests_and_refuses_new_ones(engine: aengine.Engine) -> None:
    stream = await engine.submit(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 30})
    await stream.take()
    unloading = asyncio.create_task(engine.unload_adapter("a0"))
    await anyio.lowlevel.checkpoint()
    with pytest.raises(ModelNotFoundError):
        await engine.submit(PROMPT, adapter="a0")
    with pytest.raises(ModelNotFoundError):
        await engine.unload_adapter("a0")
    assert [one.name for one in engine.adapters] == ["a1"]
    assert not unloading.done()
    while await stream.take():
        pass
    with anyio.fail_after(30):
        await unloading


async def test_unloading_waits_for_queued_requests_too(written: Written) -> None:
    async with serving(lora=written.paths, max_num_seqs=1) as engine:
        first = asyncio.create_task(engine.complete(PROMPT, adapter="a0", **GREEDY))
        waiting = await engine.submit(PROMPT, adapter="a1", **GREEDY)
        unloading = asyncio.create_task(engine.unload_adapter("a1"))
        await first
        tokens = [token for one in await _rest(waiting) for token in one.token_ids]
        assert len(tokens) == 12
        with anyio.fail_after(30):
            await unloading


async def test_unloading_ends_when_the_last_waiting_request_is_aborted(written: Written) -> None:
    async with serving(lora=written.paths, max_num_seqs=1) as engine:
        first = await engine.submit(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 2000})
        waiting = await engine.submit(PROMPT, adapter="a1", **GREEDY)
        unloading = asyncio.create_task(engine.unload_adapter("a1"))
        await first.take()
        assert not unloading.done()
        waiting.abort()
        with anyio.fail_after(30):
            await unloading
        first.abort()


async def test_a_cancelled_unloading_continues(engine: aengine.Engine) -> None:
    stream = await engine.submit(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 40})
    with anyio.move_on_after(0.01):
        await engine.unload_adapter("a0")
    await _rest(stream)
    await idle(engine)
    with pytest.raises(ModelNotFoundError):
        await engine.submit(PROMPT, adapter="a0")


@pytest.mark.slow
async def test_replaced_in_place_old_streams_go_on_and_new_ones_get_the_new(
    engine: aengine.Engine, written: Written, alone: dict[str | None, tuple[int, ...]]
) -> None:
    with pytest.raises(InvalidRequestError, match="already been loaded"):
        await engine.load_adapter("a0", written.paths["a2"])
    whole = await engine.complete(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 100})
    old = asyncio.create_task(engine.complete(PROMPT, adapter="a0", **GREEDY | {"max_tokens": 100}))
    await anyio.sleep(0.01)
    await engine.load_adapter("a0", written.paths["a2"], replace=True)
    new = await engine.complete(PROMPT, adapter="a0", **GREEDY)
    assert new.token_ids == alone["a2"]
    assert new.usage.cached_tokens == 0  # prefixes of the old one are not found
    assert (await old).token_ids == whole.token_ids


async def test_a_failed_load_leaves_all_as_it_was(engine: aengine.Engine, written: Written, tmp_path: Path) -> None:
    before = [(one.name, one.path, one.created) for one in engine.adapters]
    with pytest.raises(AdapterError, match="IA3"):
        await engine.load_adapter("x", written.refused())
    with pytest.raises(AdapterError, match="IA3"):
        await engine.load_adapter("a0", written.refused(), replace=True)
    with pytest.raises(AdapterError):
        await engine.load_adapter("x", str(tmp_path))  # an empty folder
    with pytest.raises(HubError):
        await engine.load_adapter("x", str(tmp_path / "nowhere"))
    assert [(one.name, one.path, one.created) for one in engine.adapters] == before
    assert (await engine.complete(PROMPT, adapter="a0", **GREEDY)).usage.cached_tokens == 0


async def test_names_that_cannot_be(engine: aengine.Engine, written: Written) -> None:
    names: list[Any] = ["", " ", "a b", "a,b", "a=b", "-a", "é", "x" * 201, "a\n", "aengine-demo", None]
    for name in names:
        with pytest.raises(InvalidRequestError, match="name"):
            await engine.load_adapter(name, written.paths["a2"])


async def test_what_the_host_has_no_memory_for_is_refused(written: Written) -> None:
    async with serving(lora_loading=True, lora_host_gib=0.0007) as engine:
        names = iter(written.paths)
        with pytest.raises(InvalidRequestError, match="lora_host_gib"):  # noqa: PT012
            while True:
                await engine.load_adapter(name := next(names), written.paths[name])
        loaded = len(engine.adapters)
        assert loaded > 0
        await engine.unload_adapter("a0")
        await engine.load_adapter(name, written.paths[name])
        assert len(engine.adapters) == loaded


async def test_an_adapter_that_is_named_at_the_start_and_cannot_be_read_is_an_error(written: Written) -> None:
    with pytest.raises(AdapterError, match="IA3"):
        async with serving(lora={"x": written.refused()}):
            pass
    with pytest.raises(ConfigError, match="lora: aengine-demo="):
        async with serving(lora={"aengine-demo": written.paths["a0"]}):
            pass


class Held:
    """Lets a test delay copies to the device, or make them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.let = asyncio.Event()
        self.error: Exception | None = None
        put = AdapterPlaces.put

        async def held(places: AdapterPlaces, *arguments: Any) -> None:
            self.begun.set()
            await self.let.wait()
            if self.error is not None:
                raise self.error
            await put(places, *arguments)

        monkeypatch.setattr(AdapterPlaces, "put", held)


@pytest.fixture
async def held(engine: aengine.Engine, monkeypatch: pytest.MonkeyPatch) -> Held:
    for name in ("a0", "a1"):  # which are being copied
        await engine.complete([400], adapter=name, max_tokens=1)
    return Held(monkeypatch)


async def test_while_an_adapter_is_on_its_way_others_are_served_and_its_own_may_give_up(
    engine: aengine.Engine, held: Held, written: Written, alone: dict[str | None, tuple[int, ...]]
) -> None:
    await engine.load_adapter("a2", written.paths["a2"])
    given_up = await engine.submit(PROMPT, adapter="a2", **GREEDY)
    waiting = asyncio.create_task(engine.complete(PROMPT, adapter="a2", **GREEDY))
    await held.begun.wait()
    assert (await engine.complete(PROMPT, **GREEDY)).token_ids == alone[None]
    given_up.abort()
    assert not waiting.done()
    held.let.set()
    assert (await waiting).token_ids == alone["a2"]


async def test_an_adapter_that_cannot_be_copied_fails_only_its_waiting_requests(
    engine: aengine.Engine, held: Held, written: Written, alone: dict[str | None, tuple[int, ...]]
) -> None:
    held.error = RuntimeError("out of memory")
    await engine.load_adapter("a2", written.paths["a2"])
    several = asyncio.create_task(engine.complete(PROMPT, adapter="a2", **GREEDY | {"n": 3}))
    await held.begun.wait()
    await anyio.lowlevel.checkpoint()
    held.let.set()
    with pytest.raises(EngineFailedError, match="RuntimeError"):
        await several
    assert (await engine.complete(PROMPT, **GREEDY)).token_ids == alone[None]
    held.error = None
    assert (await engine.complete(PROMPT, adapter="a2", **GREEDY)).token_ids == alone["a2"]


async def test_closing_ends_calls_that_wait_for_an_adapter_or_an_unloading(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    engine = aengine.Engine(device="cpu", lora={"a0": written.paths["a0"]}, kv_cache_gib=0.1, progress=False)
    async with engine:
        waiting = await engine.submit(PROMPT, adapter="a0", **GREEDY)
        unloading = asyncio.create_task(engine.unload_adapter("a0"))
        await held.begun.wait()
        held.let.set()
    for ended in (waiting.take(), unloading):
        with pytest.raises(EngineClosedError):
            await ended
    with pytest.raises(EngineClosedError):
        await engine.load_adapter("a1", written.paths["a1"])


# ---- with everything else -------------------------------------------------------------------------------------


async def test_the_prefix_cache_keeps_them_apart(engine: aengine.Engine) -> None:
    async def cached(adapter: str | None, **more: Any) -> int:
        return (await engine.complete(PROMPT, adapter=adapter, **GREEDY, **more)).usage.cached_tokens

    assert [await cached(name) for name in (None, "a0", "a1")] == [0, 0, 0]
    assert [await cached(name) for name in (None, "a0", "a1")] == [32, 32, 32]
    assert await cached("a0", cache_salt="mine") == 0
    assert await cached("a0", cache_salt="mine") == 32


async def test_what_was_cached_with_an_adapter_is_not_found_once_it_is_loaded_again(
    engine: aengine.Engine, written: Written
) -> None:
    await engine.complete(PROMPT, adapter="a0", **GREEDY)
    await engine.unload_adapter("a0")
    await engine.load_adapter("a0", written.paths["a0"])
    assert (await engine.complete(PROMPT, adapter="a0", **GREEDY)).usage.cached_tokens == 0


async def _rest(stream: Any) -> list[aengine.Fragment]:
    fragments = []
    while taken := await stream.take():
        fragments += taken
    return fragments
