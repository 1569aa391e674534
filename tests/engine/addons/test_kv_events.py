"""KV events, read as vLLM's subscribers do: at any time they describe the content of the prefix cache."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.engine import Engine
from aengine.errors import ConfigError
from aengine.requests.sampling_params import SamplingParams
from tests.free_port import free_port

zmq = pytest.importorskip("zmq")
pytestmark = pytest.mark.anyio


class Event(msgspec.Struct, array_like=True, tag=True):
    """The base class of vLLM's events, from its documentation of a subscriber."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Listener:
    """A subscriber's knowledge after each batch: block hash -> the parent's hash and the block's ids."""

    def __init__(self, out: object, replay: object) -> None:
        self.out, self.replay = out, replay
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []

    def take(self, number: bytes, payload: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.blocks
                    for place, one in enumerate(event.block_hashes):
                        ids = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                        self.blocks[one] = (parent, tuple(ids))
                        parent = one
                case BlockRemoved():
                    for one in event.block_hashes:
                        del self.blocks[one]
                case AllBlocksCleared():
                    self.blocks.clear()

    def prefixes(self) -> set[tuple[int, ...]]:
        """Return the token ids from the first one to the end of each block."""

        def whole(block: int) -> tuple[int, ...]:
            parent, ids = self.blocks[block]
            return ids if parent is None else whole(parent) + ids

        return {whole(block) for block in self.blocks}


@asynccontextmanager
async def listened(**knobs: object) -> AsyncIterator[tuple[Engine, Listener]]:
    addresses = [f"tcp://127.0.0.1:{port}" for port in (free_port(), free_port())]
    context = zmq.Context()
    out, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        knobs = {"kv_events": addresses[0], "kv_events_replay": addresses[1], "kv_events_topic": "kv", **knobs}
        async with Engine(device="cpu", progress=False, max_model_len=512, **knobs) as engine:
            out.connect(addresses[0])
            out.subscribe(b"kv")
            replay.connect(addresses[1])
            yield engine, Listener(out, replay)
    finally:
        context.destroy(linger=0)


async def caught_up(listener: Listener) -> None:
    """Request all batches again from the start, like a subscriber that missed them."""

    def ask() -> None:
        listener.blocks.clear()
        listener.numbers.clear()
        listener.replay.send_multipart((b"", (0).to_bytes(8, "big")))  # type: ignore[attr-defined]
        while listener.replay.poll(10_000):  # type: ignore[attr-defined]
            _, number, payload = listener.replay.recv_multipart()  # type: ignore[attr-defined]
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            listener.take(number, payload)
        raise AssertionError("no answer")

    await anyio.to_thread.run_sync(ask)


def held(engine: Engine) -> set[tuple[int, ...]]:
    """Return the prefixes in the tree, page by page."""
    size, found = engine.prefix_tree.page_size, set()
    stack = [(child, ()) for child in engine.prefix_tree.root.children.values()]
    while stack:
        node, before = stack.pop()
        ids = before + tuple(memoryview(node.data).cast("I").tolist())
        found |= {ids[:end] for end in range(len(before) + size, len(ids) + 1, size)}
        stack += [(child, ids) for child in node.children.values()]
    return found


@pytest.mark.slow
async def test_events_tell_what_is_cached_through_splits_evictions_and_a_flush() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    async with listened(num_pages=34) as (engine, listener):
        for first in range(12):  # more than the pool holds; every second one shares a prefix with its predecessor
            ids = [(first // 2 + place) % 900 + 300 for place in range(64)] + [first + 300] * 32
            await engine.complete(ids, greedy)
            await caught_up(listener)
            assert listener.prefixes() == held(engine)
            assert listener.numbers == list(range(len(listener.numbers)))
        assert len(held(engine)) > 12
        engine.flush_cache()
        await caught_up(listener)
        assert listener.prefixes() == set()


async def test_a_subscriber_hears_of_a_stored_block_with_its_topic() -> None:
    async with listened() as (engine, listener):
        greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

        def hear() -> list[bytes]:
            assert listener.out.poll(10_000)  # type: ignore[attr-defined]
            parts: list[bytes] = listener.out.recv_multipart()  # type: ignore[attr-defined]
            return parts

        async with anyio.create_task_group() as tasks:

            async def ask() -> None:  # repeatedly, because a subscription takes a moment to arrive
                for number in range(1000):
                    await engine.complete([number % 900 + 300] * 40, greedy)

            tasks.start_soon(ask)
            topic, number, payload = await anyio.to_thread.run_sync(hear)
            tasks.cancel_scope.cancel()
        (stored, *_) = msgspec.msgpack.decode(payload, type=Batch).events
        assert topic == b"kv"
        assert len(number) == 8
        assert isinstance(stored, BlockStored)
        assert len(stored.token_ids) == len(stored.block_hashes) * stored.block_size


async def test_tenants_blocks_have_other_hashes() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=1)
    async with listened() as (engine, listener):
        await engine.complete([300] * 33, greedy)
        await engine.complete([300] * 33, greedy, cache_salt="another")
        await caught_up(listener)
        assert len(listener.blocks) == 4
        assert len(listener.prefixes()) == 2


async def test_an_address_that_is_taken_is_refused_by_its_knob() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"kv_events_replay: .* cannot be bound"):
            async with Engine(kv_events="tcp://127.0.0.1:*", kv_events_replay=address):
                pass


def test_without_the_library_the_error_names_the_extra() -> None:
    module = "aengine.engine.addons.kv_events"
    code = f"import sys; sys.modules['zmq'] = None; from {module} import Publisher; Publisher(sys.argv)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install '.[kv-events]'" in found.stderr


def test_the_knob_is_off_by_default() -> None:
    assert configure(EngineConfig, {}).kv_events is None
