"""Weights reloaded in place: running requests end with the old ones, new requests get the new ones.

No stale prefix is used, and a checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from safetensors.torch import load_file, save_file

import aengine
from aengine.errors import (
    AdapterError,
    CheckpointError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    WeightsError,
)
from aengine.model.checkpoint.pieces import Piece
from aengine.model.checkpoint.staging import StagingBuffer
from aengine.model.loading import hub
from aengine.runtime.weights import Weights
from tests.demo_reference import load_demo
from tests.engine.adapters import Written
from tests.engine.checkpoints import other_demo, with_config
from tests.engine.conftest import idle
from tests.model.lora.adapters import write_adapter

pytestmark = pytest.mark.anyio

KNOBS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "kv_cache_gib": 0.1, "progress": False}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
PROMPT = [300 + number * 7 % 2000 for number in range(50)]

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model with other weights."""
    return other_demo(tmp_path_factory.mktemp("reload") / "other")


async def ids(engine: aengine.Engine, **options: Any) -> Ids:
    return (await engine.complete(PROMPT, **GREEDY | options)).token_ids


async def fresh(model: Path, **knobs: Any) -> Ids:
    """The ids that an engine of that checkpoint draws."""
    async with aengine.Engine(str(model), **KNOBS | knobs) as engine:
        return await ids(engine)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        pytest.param({"quantization": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_the_ids_are_those_of_the_other_model(other: Path, knobs: dict[str, Any]) -> None:
    async with aengine.Engine(**KNOBS, **knobs) as engine:
        before = await ids(engine)
        await engine.reload(other)
        after = await engine.complete(PROMPT, **GREEDY)
        assert after.token_ids == await fresh(other, **knobs) != before
        assert after.usage.cached_tokens == 0
        await engine.reload()  # the model's own folder
        assert await ids(engine) == before
        await idle(engine)


class Barred:
    """Stops reloads before the first tensor is read, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        reload = Weights.reload

        def barred(weights: Weights, checkpoint: Any) -> None:
            self.entered.set()
            assert self.go.wait(30)
            reload(weights, checkpoint)

        monkeypatch.setattr(Weights, "reload", barred)


async def test_old_requests_end_with_the_old_weights_and_new_ones_wait(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barred = Barred(monkeypatch)
    async with aengine.Engine(**KNOBS) as engine:
        long = GREEDY | {"max_tokens": 60}
        alone = await engine.complete(PROMPT, **long)
        wanted = await fresh(other)
        old = asyncio.create_task(engine.complete(PROMPT, **long))
        while not engine.stats().running:
            await anyio.lowlevel.checkpoint()
        reloading = asyncio.create_task(engine.reload(other))
        while not engine._service.requests.gate.holding:  # noqa: ASYNC110 - the gate has no such event
            await anyio.sleep(0.001)
        new = [asyncio.create_task(ids(engine)) for _ in range(3)]
        assert (await old).token_ids == alone.token_ids
        assert await asyncio.to_thread(barred.entered.wait, 30)
        assert not any(task.done() for task in new)
        assert not engine.refusal  # requests wait and are not refused
        barred.go.set()
        await reloading
        assert await asyncio.gather(*new) == [wanted] * 3
        await idle(engine)


async def test_only_so_many_wait(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barred = Barred(monkeypatch)
    async with aengine.Engine(**KNOBS, max_queue=1) as engine:
        reloading = asyncio.create_task(engine.reload(other))
        assert await asyncio.to_thread(barred.entered.wait, 30)
        first = asyncio.create_task(ids(engine))
        while not engine._service.requests.gate.held:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(QueueFullError):
            await ids(engine)
        barred.go.set()
        await reloading
        await first


def norm_of(tensors: Iterable[str]) -> str:
    """Return the name of the last norm of the language model."""
    return next(name for name in tensors if name in ("model.norm.weight", "model.language_model.norm.weight"))


def lacking(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[norm_of(tensors)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def misshapen(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = norm_of(tensors)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


async def test_another_model_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[Path], object], str]] = [
        (lambda folder: with_config(folder, rms_norm_eps=1e-3), "rms_norm_eps is 0.001, that of the loaded model"),
        (lambda folder: with_config(folder, hidden_size=128), "hidden_size is 128"),
        (lambda folder: with_config(folder, architectures=["LlamaForCausalLM"]), "architecture"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lacking, "lack model.norm.weight"),
        (misshapen, "model.norm.weight has shape"),
    ]
    async with aengine.Engine(**KNOBS) as engine:
        before = await ids(engine)
        for number, (damage, why) in enumerate(cases):
            folder = Path(shutil.copytree(hub.DEMO, tmp_path / str(number)))
            damage(folder)
            with pytest.raises(CheckpointError, match=why):
                await engine.reload(folder)
            after = await engine.complete(PROMPT, **GREEDY)
            assert after.token_ids == before
            assert after.usage.cached_tokens  # the cache is kept, too


async def test_a_checkpoint_that_a_knob_does_not_fit_is_refused_as_such(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hub.DEMO, tmp_path / "quantised"))
    with_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})
    async with aengine.Engine(**KNOBS, quantization="fp8") as engine:
        before = await ids(engine)
        with pytest.raises(WeightsError, match="knobs do not fit this checkpoint: quantization: fp8 was asked for"):
            await engine.reload(folder)
        assert await ids(engine) == before


async def test_a_folder_that_there_is_not() -> None:
    async with aengine.Engine(**KNOBS) as engine:
        with pytest.raises(InvalidRequestError, match="there is no folder"):
            await engine.reload("/nowhere/at/all")


async def test_no_mixture_is_served(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, left = StagingBuffer.fill, [5]

    def failing(buffer: StagingBuffer, piece: Piece) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise WeightsError("the disk is gone")
        fill(buffer, piece)

    async with aengine.Engine(**KNOBS, sleep_mode=True) as engine:
        before = await ids(engine)
        with monkeypatch.context() as patched:
            patched.setattr(StagingBuffer, "fill", failing)
            with pytest.raises(WeightsError, match="the disk is gone"):
                await engine.reload(other)
        for _ in range(2):
            with pytest.raises(EngineNotReadyError, match="mixture"):
                await ids(engine)
            await engine.sleep()  # does not repair the mixture
            await engine.wake_up()
        assert engine.refusal
        await engine.reload(other)
        after = await engine.complete(PROMPT, **GREEDY)
        assert (after.token_ids, after.usage.cached_tokens) == (await fresh(other), 0)
        await engine.reload()
        assert await ids(engine) == before


@pytest.mark.slow
async def test_adapters_stay(other: Path, tmp_path: Path) -> None:
    written = Written(tmp_path, 1)
    knobs = KNOBS | {"lora": {"a0": written.paths["a0"]}}
    async with aengine.Engine(str(other), **knobs) as engine:
        wanted = await ids(engine, adapter="a0")
        plain = await ids(engine)
    async with aengine.Engine(**knobs) as engine:
        before = await ids(engine, adapter="a0")
        await engine.reload(other)
        assert await ids(engine, adapter="a0") == wanted != before
        assert await ids(engine) == plain


@pytest.mark.slow
@pytest.mark.parametrize("scaled_first", [pytest.param(True, marks=pytest.mark.slow), False])
async def test_scales_of_keys_and_values_go_with_their_checkpoint(scaled_first: bool, tmp_path: Path) -> None:
    """One checkpoint has scales, so small that much is cut off; the other has none."""
    scaled = Path(shutil.copytree(hub.DEMO, tmp_path / "scaled"))
    tensors = load_file(scaled / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{part}_scale": torch.tensor(1e-3) for part in "kv"}
    save_file(tensors, scaled / "model.safetensors", {"format": "pt"})
    first, second = (scaled, hub.DEMO) if scaled_first else (hub.DEMO, scaled)
    wanted = [await fresh(one, kv_cache_dtype="fp8") for one in (first, second)]
    assert wanted[0] != wanted[1]
    async with aengine.Engine(str(first), **KNOBS, kv_cache_dtype="fp8") as engine:
        assert await ids(engine) == wanted[0]
        await engine.reload(second)
        assert await ids(engine) == wanted[1]


async def test_adapters_that_come_are_those_of_the_new_weights(other: Path, tmp_path: Path) -> None:
    """PEFT stores a copy of the output matrix with its factors. It must equal the base's."""
    model = load_demo(other)
    adapter, without = str(tmp_path / "adapter"), str(tmp_path / "without")
    for folder, copies in ((adapter, "auto"), (without, False)):
        write_adapter(model, Path(folder), target_modules=["lm_head", "q_proj"], save_embedding_layers=copies)
    async with aengine.Engine(str(other), **KNOBS, lora={"a": adapter}) as engine:
        wanted = await ids(engine, adapter="a")
    async with aengine.Engine(**KNOBS, lora={"room": without}, max_loras=2, lora_loading=True) as engine:
        with pytest.raises(AdapterError, match="not the base's own output matrix"):
            await engine.load_adapter("a", adapter)
        await engine.reload(other)
        await engine.load_adapter("a", adapter)
        assert await ids(engine, adapter="a") == wanted


async def test_one_at_a_time(other: Path) -> None:
    async with aengine.Engine(**KNOBS, sleep_mode=True) as engine:
        changes = [engine.reload(other), engine.sleep(), engine.wake_up(), engine.reload(), engine.reload(other)]
        async with asyncio.TaskGroup() as tasks:
            for change in changes:
                tasks.create_task(change)
        assert await ids(engine) == await fresh(other)
