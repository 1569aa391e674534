"""Images on a GPU: ids are those of transformers on the CPU, nothing is compiled while serving, and nothing waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

import aengine
from aengine.runtime.runner import StepExecutor
from aengine.runtime.step.images import ImageEncoder
from aengine.step_plan import StepPlan
from bench.images import jpeg, words, write_model
from tests.engine.images.seeing import CHATS, GREEDY, Chat, Seeing, ask, computed, make_seeing, message
from tests.model.towers.checkpoints import picture

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

# Heads of recurrent layers as wide as the kernels for them are made for. Gemma 4 has two kinds of layers.
WIDE: dict[str, dict[str, Any]] = {
    "qwen3-5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "gemma3": {"head_dim": 64},
    "gemma4-plain": {"head_dim": 64, "global_head_dim": 128},
}
KNOBS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.25}
WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"lookahead": False, "max_step_tokens": 24, "max_num_seqs": 3, "page_size": 4},
    {"prefix_cache": False},
    {"max_mixed_tokens": 128, "page_size": 1},
    {"speculation": "ngram"},
    {"tensor_parallel_size": 2},
]


@pytest.fixture(scope="module", params=["qwen3-5", "qwen3-vl", "mistral3", "gemma3", "gemma4", "gemma4-plain"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A small model, and the answers of transformers in float32 on the CPU."""
    return make_seeing(request.param, tmp_path_factory.mktemp(request.param), **WIDE.get(request.param, {}))


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("knobs", WAYS, ids=str)
async def test_float32_ids_equal_those_of_transformers(seeing: Seeing, knobs: dict[str, Any]) -> None:
    if knobs.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    if seeing.case == "gemma4-plain" and "max_step_tokens" in knobs:
        knobs = knobs | {"max_step_tokens": 143}  # a step holds a whole image, and a token of each row
    async with seeing.engine(**(KNOBS | knobs)) as engine:
        assert engine.no_images == ""
        for _ in range(2):  # the second time from the cache
            assert [one.token_ids for one in await ask(engine)] == seeing.expected
        for chat, expected in zip(CHATS, seeing.expected):
            [one] = await ask(engine, [chat])
            assert one.token_ids == expected


async def test_ids_after_sleep(seeing: Seeing) -> None:
    async with seeing.engine(**KNOBS, sleep_mode=True) as engine:
        counts = [computed(engine)]  # start-up computes some, too
        assert [one.token_ids for one in await ask(engine)] == seeing.expected
        counts.append(computed(engine))
        for _ in range(2):
            await engine.sleep()
            await engine.wake_up()
            assert [one.token_ids for one in await ask(engine)] == seeing.expected
            counts.append(computed(engine))
        first, *later = (after - before for before, after in pairwise(counts))
        assert first > 0
        assert later == [first] * 2
        await engine.reload(seeing.folder)
        assert [one.token_ids for one in await ask(engine)] == seeing.expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_nothing_is_compiled_and_nothing_waits(
    seeing: Seeing, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[object] = []
    steps = {"images": 0, "parts": 0}
    real_pass, real_advance = StepExecutor._pass, ImageEncoder.advance

    def strict_pass(executor: StepExecutor, plan: StepPlan) -> Any:
        steps["images"] += any(chunk.images is not None for chunk in plan.prefill)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real_pass(executor, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def strict_advance(encoder: ImageEncoder, plan: StepPlan) -> None:
        steps["parts"] += any(work.blocks for work in plan.encodings)
        torch.cuda.set_sync_debug_mode("error")
        try:
            real_advance(encoder, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    async with seeing.engine(**(KNOBS | {"dtype": dtype, "max_num_seqs": 40, "max_mixed_tokens": 128})) as engine:
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
        monkeypatch.setattr(StepExecutor, "_pass", strict_pass)
        monkeypatch.setattr(ImageEncoder, "advance", strict_advance)
        rng = random.Random(3)
        for together in (1, 2, 7, 40):
            chats: list[Chat] = []
            for _ in range(together):
                images = [picture(*_size(rng), seed=rng.randrange(10**6)) for _ in range(rng.choice([0, 1, 1, 2]))]
                text = " ".join(f"w{rng.randrange(100)}" for _ in range(rng.randint(1, 60)))
                chats.append([text, *images])
            answers = [engine.chat(message(chat), max_tokens=rng.randint(2, 20), **GREEDY) for chat in chats]
            await asyncio.gather(*answers)
        engine.check_integrity()
    assert compiled == []
    assert steps["images"] > 10


def _size(rng: random.Random) -> tuple[int, int]:
    return rng.randint(10, 90), rng.randint(10, 90)


@pytest.mark.alone  # others' memory would leave less for the pool
@pytest.mark.parametrize(("shape", "tower"), [("0.6b", "qwen3.5"), ("gemma3-30m", "gemma3")])
async def test_the_largest_images_fit_beside_full_steps(shape: str, tower: str, tmp_path: Path) -> None:
    """All of the engine's share of the device is taken at the start. Whatever needs more memory fails."""
    write_model(tmp_path, shape, tower)
    knobs: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "gpu_memory_utilization": 0.12}
    knobs |= {"max_model_len": 8192, "max_num_seqs": 32, "progress": False, "speculation": "off"}
    rng = random.Random(5)

    def chat(side: int) -> list[dict[str, Any]]:
        image = {"type": "image", "image": jpeg(rng.randrange(10**6), side)}
        return [{"role": "user", "content": [image, {"type": "text", "text": words(rng, 20)}]}]

    async with aengine.Engine(str(tmp_path), **knobs) as engine:
        greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        texts = [[rng.randrange(4000) for _ in range(6000)] for _ in range(12)]
        work: list[Any] = [engine.complete(text, max_tokens=64, **greedy) for text in texts]
        work += [engine.chat(chat(side), max_tokens=32, **greedy) for side in (2800, 300, 1000, 2800, 1500, 64)]
        work += [engine.chat(chat(700), max_tokens=32, **greedy) for _ in range(20)]
        for done in await asyncio.gather(*work):
            assert len(done.token_ids) in (32, 64)
        engine.check_integrity()
