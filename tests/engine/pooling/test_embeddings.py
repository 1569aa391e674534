"""Embeddings equal transformers' (float32), whatever else runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import aengine
from aengine.errors import EngineClosedError, EngineFailedError, InvalidRequestError, QueueFullError
from aengine.runtime.runner import StepExecutor
from tests.engine.conftest import idle
from tests.engine.pooling.checkpoints import FAMILIES, HIDDEN, VOCAB, hidden_states, write, write_modules

pytestmark = pytest.mark.anyio

RNG = random.Random(5)
SHARED = [RNG.randrange(VOCAB) for _ in range(40)]
PROMPTS = [
    [*(SHARED if number % 2 else []), *(RNG.randrange(VOCAB) for _ in range(length))]
    for number, length in enumerate([1, 2, 15, 16, 17, 31, 60, 90])
]
CLOSE = {"rtol": 0, "atol": 1e-4}


@asynccontextmanager
async def running(folder: Path, **knobs: Any) -> AsyncIterator[aengine.Engine]:
    usual: dict[str, Any] = {"max_num_seqs": 16, "num_pages": 200, "max_model_len": 256, "progress": False}
    async with aengine.Engine(str(folder), device="cpu", **{**usual, **knobs}) as engine:
        yield engine
        await idle(engine)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - the engine has no such event
            await asyncio.sleep(0)


def matrix(embeddings: aengine.Embeddings) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.stack([np.asarray(vector) for vector in embeddings.vectors])
    assert found.dtype == np.float32
    return found


def last(model: PreTrainedModel, prompts: Sequence[list[int]] = PROMPTS) -> Tensor:
    return torch.stack([hidden_states(model, ids)[-1] for ids in prompts])


def mean(model: PreTrainedModel, prompts: Sequence[list[int]] = PROMPTS) -> Tensor:
    return torch.stack([hidden_states(model, ids).mean(0) for ids in prompts])


def unit(vectors: Tensor) -> Any:
    return torch.nn.functional.normalize(vectors, dim=-1).numpy()


@pytest.fixture(scope="module")
def by_last(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("last")
    return folder, write(folder, "qwen3", "vocabulary", tie_word_embeddings=True, eos_token_id=4091)


@pytest.fixture(scope="module")
def by_mean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mean")
    model = write(folder, "qwen2", "vocabulary")
    write_modules(folder, "Pooling", word_embedding_dimension=HIDDEN, pooling_mode_mean_tokens=True)
    return folder, model


@pytest.mark.parametrize("head", ["none", pytest.param("vocabulary", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_embeds_by_its_last_token(tmp_path: Path, family: str, head: str) -> None:
    model = write(tmp_path, family, head)
    async with running(tmp_path) as engine:
        embeddings = await engine.embed(PROMPTS)
        assert np.allclose(matrix(embeddings), unit(last(model)), **CLOSE)
        assert embeddings.usage.prompt_tokens == sum(map(len, PROMPTS)) == engine.stats().prompt_tokens
        raw = matrix(await engine.embed(PROMPTS[:3], normalize=False))
        assert np.allclose(raw, last(model, PROMPTS[:3]), **CLOSE)


@pytest.mark.parametrize("lookahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["last", "mean"])
async def test_one_by_one_together_cached_and_during_generation(
    by_last: tuple[Path, PreTrainedModel], by_mean: tuple[Path, PreTrainedModel], kind: str, lookahead: bool
) -> None:
    folder, model = by_last if kind == "last" else by_mean
    expected = unit(last(model)) if kind == "last" else mean(model).numpy()
    async with running(folder, lookahead=lookahead) as engine:
        for _ in range(2):  # the second time everything is cached
            for ids, row in zip(PROMPTS, expected, strict=True):
                one = await engine.embed(ids)
                assert np.allclose(matrix(one), row, **CLOSE)
        assert (one.usage.cached_tokens > 0) == (kind == "last")
        together = await asyncio.gather(*(engine.embed(PROMPTS) for _ in range(3)))
        for embeddings in together:
            assert np.allclose(matrix(embeddings), expected, **CLOSE)


async def test_other_tasks_run_while_many_prompts_are_enqueued(by_last: tuple[Path, PreTrainedModel]) -> None:
    async with running(by_last[0]) as engine:
        task = asyncio.create_task(engine.embed([[1, 2, 3]] * 500))
        turns = 0
        while not engine.stats().waiting:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 450
        await task


async def test_requests_that_generate_draw_the_same_next_to_pooled_ones(by_last: tuple[Path, PreTrainedModel]) -> None:
    folder, model = by_last
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 0.9, "seed": 3, "n": 2, "logprobs": 2, "max_tokens": 30, "ignore_eos": True},
        {"temperature": 0, "prompt_logprobs": 2, "max_tokens": 5, "ignore_eos": True},
        {"temperature": 0, "structured": aengine.Structured(regex="[a-z]{20}")},
    ]
    async with running(folder, max_step_tokens=24) as engine:
        alone = [await engine.complete(PROMPTS[-1], **one) for one in asked]
        engine.flush_cache()
        beside = asyncio.gather(*(engine.complete(PROMPTS[-1], **one) for one in asked))
        embeddings = []
        while not beside.done():
            embeddings.append(await engine.embed(PROMPTS, cache_salt=str(len(embeddings))))
        for ours, theirs in zip(await beside, alone, strict=True):
            assert [choice.token_ids for choice in ours.choices] == [choice.token_ids for choice in theirs.choices]
    assert len(embeddings) > 1
    for found in embeddings:
        assert np.allclose(matrix(found), unit(last(model)), **CLOSE)


@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        (1, (1, 5, 16)),
        (2, (7,)),
        pytest.param(1, range(1, 39), marks=pytest.mark.slow),
        pytest.param(2, (1, 16), marks=pytest.mark.slow),
    ],
    ids=["some", "over two ranks", "all", "at more over two ranks"],
)
@pytest.mark.parametrize("kind", ["last", "mean"])
async def test_cut_at_every_token(
    by_last: tuple[Path, PreTrainedModel],
    by_mean: tuple[Path, PreTrainedModel],
    kind: str,
    ranks: int,
    cuts: Sequence[int],
) -> None:
    folder, model = by_last if kind == "last" else by_mean
    prompts = [SHARED[:37], SHARED[5:24]]
    expected = unit(last(model, prompts)) if kind == "last" else mean(model, prompts).numpy()
    for tokens in cuts:
        knobs = {"max_num_seqs": 1, "max_step_tokens": tokens, "tensor_parallel_size": ranks, "torch_threads": 1}
        async with running(folder, **knobs) as engine:
            assert np.allclose(matrix(await engine.embed(prompts)), expected, **CLOSE), tokens


@pytest.mark.parametrize("kind", ["last", pytest.param("mean", marks=pytest.mark.slow)])
async def test_preempted_halfway(
    by_last: tuple[Path, PreTrainedModel], by_mean: tuple[Path, PreTrainedModel], kind: str
) -> None:
    folder, model = by_last if kind == "last" else by_mean
    expected = unit(last(model)) if kind == "last" else mean(model).numpy()
    knobs = {"page_size": 1, "num_pages": 200, "max_model_len": 140, "max_step_tokens": 16, "max_num_seqs": 8}
    async with running(folder, **knobs) as engine:
        writers = [await engine.submit([number] * 4, max_tokens=100, ignore_eos=True) for number in range(1, 5)]
        for writer in writers:
            await writer.take()
        assert np.allclose(matrix(await engine.embed(PROMPTS, priority=1)), expected, **CLOSE)
        assert engine.stats().preemptions > 0
        for writer in writers:
            writer.abort()


async def test_text_is_read_as_the_tokenizer_reads_it(by_last: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = by_last
    async with running(folder) as engine:
        ids = engine.tokenizer.encode_now("The capital of France")
        text, listed, by_ids, mixed = (
            await engine.embed("The capital of France"),
            await engine.embed(["The capital of France"]),
            await engine.embed(ids),
            await engine.embed(["The capital of France", ids]),
        )
        for found in (text, listed, by_ids, mixed):
            assert np.allclose(matrix(found), matrix(text), **CLOSE)
        assert mixed.usage.prompt_tokens == 2 * len(ids)


async def test_a_prompt_may_fill_the_context(by_last: tuple[Path, PreTrainedModel]) -> None:
    folder, model = by_last
    ids = [RNG.randrange(VOCAB) for _ in range(64)]
    async with running(folder, max_model_len=64) as engine:
        assert np.allclose(matrix(await engine.embed(ids)), unit(last(model, [ids])), **CLOSE)
        with pytest.raises(aengine.ContextLengthError, match="65 tokens"):
            await engine.embed([*ids, 1])
        with pytest.raises(aengine.ContextLengthError, match="64 tokens"):
            await engine.embed("a b c " * 999)


async def test_dimensions_only_where_the_checkpoint_allows_them(tmp_path: Path) -> None:
    for name, changes, knobs in (
        ("plain", {}, {}),
        ("any", {"is_matryoshka": True}, {}),
        ("some", {"matryoshka_dimensions": [8, 32]}, {}),
        ("knob", {}, {"matryoshka": True}),
    ):
        model = write(tmp_path / name, "qwen3", "none", **changes)
        allowed = {"plain": [HIDDEN], "any": [1, 8, HIDDEN], "some": [8, 32, HIDDEN], "knob": [8, 63]}[name]
        refused = {"plain": [8, 0, 65], "any": [0, 65, True], "some": [16, 65], "knob": [65]}[name]
        async with running(tmp_path / name, **knobs) as engine:
            for dimensions in allowed:
                found = matrix(await engine.embed(PROMPTS[:2], dimensions=dimensions))
                assert np.allclose(found, unit(last(model, PROMPTS[:2])[:, :dimensions]), **CLOSE)
            for dimensions in refused:
                with pytest.raises(InvalidRequestError, match="dimensions") as caught:
                    await engine.embed("a", dimensions=dimensions)
                assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("modules", "pooling", "reference"),
    [
        (("Pooling", "Normalize"), {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "unit last"),
        (("Pooling",), {"pooling_mode_lasttoken": True}, "last"),
        (("Pooling", "Normalize"), {"pooling_mode_mean_tokens": True}, "unit mean"),
        (("Pooling",), {"pooling_mode": "lasttoken"}, "last"),
        (("Pooling",), {"pooling_mode": ["mean"]}, "mean"),
        (("Pooling",), {}, "mean"),
    ],
)
async def test_as_sentence_transformers_files_say(
    tmp_path: Path, modules: tuple[str, ...], pooling: dict[str, object], reference: str
) -> None:
    model = write(tmp_path, "qwen3", "none")
    write_modules(tmp_path, *modules, word_embedding_dimension=HIDDEN, **pooling)
    vectors = last(model) if "last" in reference else mean(model)
    async with running(tmp_path) as engine:
        found = matrix(await engine.embed(PROMPTS))
    assert np.allclose(found, unit(vectors) if "unit" in reference else vectors.numpy(), **CLOSE)


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        (("Pooling", "Dense"), {"pooling_mode_lasttoken": True}, "Dense"),
        (("Pooling",), {"pooling_mode_cls_token": True}, "cls_token"),
        (("Pooling",), {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
    ],
)
async def test_unknown_modules_are_refused_and_generation_continues(
    tmp_path: Path, modules: tuple[str, ...], pooling: dict[str, object], why: str
) -> None:
    write(tmp_path, "qwen3", "vocabulary")
    write_modules(tmp_path, *modules, **pooling)
    async with running(tmp_path) as engine:
        for work in (lambda: engine.embed("a"), lambda: engine.score("a", "b")):
            with pytest.raises(InvalidRequestError, match=why):
                await work()
        assert (await engine.complete("a", max_tokens=1)).usage.completion_tokens == 1


async def test_a_checkpoint_without_the_matrix_that_its_config_asks_for(tmp_path: Path) -> None:
    """Saved from the bare model, with the architecture of the language model, like the large Qwen3-Embedding models."""
    model = write(tmp_path, "qwen3", "none", architectures=["Qwen3ForCausalLM"])
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"Qwen3Model"', '"Qwen3ForCausalLM"'))
    with pytest.raises(aengine.WeightsError, match="lm_head"):
        async with running(tmp_path):
            pass
    write_modules(tmp_path, "Pooling", "Normalize", pooling_mode_lasttoken=True)
    async with running(tmp_path) as engine:
        assert np.allclose(matrix(await engine.embed(PROMPTS)), unit(last(model)), **CLOSE)


async def test_a_model_without_an_output_matrix_generates_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    async with running(tmp_path) as engine:
        with pytest.raises(InvalidRequestError, match="generates nothing") as caught:
            await engine.complete("a", max_tokens=1)
        assert caught.value.param == "model"
        with pytest.raises(InvalidRequestError, match="classification head"):
            await engine.classify("a")


async def test_bad_inputs_are_refused_by_name(engine: aengine.Engine) -> None:
    cases: list[Any] = [[], "", [[]], ["a", ""], [VOCAB], [-1], ["a"] * 2049, b"a", 7, [1.5], [None]]
    for prompts in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.embed(prompts)
        assert caught.value.param == "prompt"


async def test_unknown_options_are_refused(engine: aengine.Engine) -> None:
    for options, name in (({"temperature": 0}, "temperature"), ({"priority": 0.5}, "priority")):
        with pytest.raises(InvalidRequestError) as caught:
            await engine.embed("a", **options)
        assert caught.value.param == name


async def test_a_full_queue_takes_all_of_a_request_or_nothing() -> None:
    async with aengine.Engine(device="cpu", max_num_seqs=1, max_queue=4, num_pages=100, progress=False) as engine:
        writer = await engine.submit([5], max_tokens=1000, ignore_eos=True)
        await writer.take()
        many = asyncio.ensure_future(engine.embed([[number] for number in range(6)]))
        await until(lambda: engine.stats().waiting)
        with pytest.raises(QueueFullError):
            await engine.embed([[1]])
        assert engine.stats().waiting == 6
        writer.abort()
        assert len((await many).vectors) == 6
        await idle(engine)


async def test_a_cancelled_call_frees_everything(by_last: tuple[Path, PreTrainedModel]) -> None:
    async with running(by_last[0], max_step_tokens=16) as engine:
        task = asyncio.ensure_future(engine.embed([PROMPTS[-1]] * 40, request_id="mine"))
        await until(lambda: engine.stats().running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert not engine.abort("mine")
        assert engine.stats().requests == 1
        aborted = asyncio.ensure_future(engine.embed([PROMPTS[-1]] * 40, request_id="mine"))
        await until(lambda: engine.stats().running)
        with pytest.raises(InvalidRequestError, match="already running"):
            await engine.embed("a", request_id="mine")
        assert engine.abort("mine")
        with pytest.raises(EngineClosedError, match="aborted"):
            await aborted


async def test_closing_the_engine_ends_it(by_last: tuple[Path, PreTrainedModel]) -> None:
    async with aengine.Engine(str(by_last[0]), device="cpu", max_num_seqs=4, num_pages=100, progress=False) as engine:
        task = asyncio.ensure_future(engine.embed([PROMPTS[-1]] * 40))
        await until(lambda: engine.stats().running)
    with pytest.raises(EngineClosedError):
        await task


async def test_numbers_that_are_not_finite_fail_the_request_alone(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3", "none")
    with torch.no_grad():
        model.embed_tokens.weight[7].fill_(float("nan"))  # type: ignore[operator, union-attr]
    model.save_pretrained(tmp_path)
    async with running(tmp_path) as engine:
        bad, good = await asyncio.gather(
            engine.embed([[1, 2], [7, 8], [3]]), engine.embed([[1, 2], [3]]), return_exceptions=True
        )
        assert isinstance(bad, aengine.NonFiniteLogitsError)
        assert isinstance(good, aengine.Embeddings)
        assert np.allclose(matrix(good), unit(last(model, [[1, 2], [3]])), **CLOSE)


async def test_a_failed_step_fails_the_request(
    by_last: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(by_last[0]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(StepExecutor, "forward", lambda *_: 1 / 0)
            with pytest.raises(EngineFailedError):
                await engine.embed(PROMPTS)
        assert len((await engine.embed(PROMPTS)).vectors) == len(PROMPTS)
