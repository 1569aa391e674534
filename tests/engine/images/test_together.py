"""Images together with speculation, new weights, disk caches, logprobs and requests of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import aengine
from aengine.engine.requests import image_reading
from aengine.runtime.startup import start_torch
from aengine.runtime.step import image_memory
from aengine.runtime.step.image_memory import KeptEmbeddings
from aengine.runtime.step.images import ImageEncoder
from aengine.step_plan import ImageCost, StepPlan
from tests.engine.addons.chats import all_copied, bring_whatever_there_is
from tests.engine.checkpoints import other_numbers
from tests.engine.images.seeing import CHATS, GREEDY, NEW, Seeing, answer, ask, computed, make_seeing, message
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import make_tensors, write_head
from tests.model.drafting.mtp_checkpoints import change_text_config, mtp_tensors
from tests.model.lora.adapters import write_adapter
from tests.model.towers.checkpoints import processed

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_seeing("qwen3-vl", tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("mtp")
    seeing = make_seeing("qwen3-5", folder)
    settings: dict[str, object] = {"mtp_num_hidden_layers": 1}
    change_text_config(folder, **settings)
    tensors = load_file(folder / "model.safetensors")
    new = mtp_tensors("qwen3-5", tensors, settings)
    save_file({**tensors, **new}, folder / "model.safetensors", {"format": "pt"})
    return seeing


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"max_step_tokens": 40, "page_size": 1}, {"num_pages": 60, "page_size": 4}])
async def test_an_mtp_layer(with_mtp: Seeing, knobs: dict[str, Any]) -> None:
    async with with_mtp.engine(speculation="mtp", max_model_len=200, **knobs) as engine:
        for _ in range(2):
            assert [one.token_ids for one in await ask(engine)] == with_mtp.expected
        assert engine.stats().drafted_tokens > 0


@pytest.mark.slow
async def test_an_eagle3_head(qwen: Seeing, tmp_path: Path) -> None:
    head = HeadSettings(target_vocab=128, draft_vocab=128, taps=(0, 1, 2), own_head=False)
    write_head(head, tmp_path, make_tensors(head))
    for knobs in ({}, {"max_step_tokens": 48, "page_size": 1}):
        async with qwen.engine(speculation=f"eagle3={tmp_path}", **knobs) as engine:
            for _ in range(2):
                assert [one.token_ids for one in await ask(engine)] == qwen.expected
            assert engine.stats().drafted_tokens > 0


async def test_adapters_change_the_decoder_alone(qwen: Seeing, tmp_path: Path) -> None:
    merged = write_adapter(qwen.model, tmp_path, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])
    async with qwen.engine(lora={"other": str(tmp_path)}, page_size=4) as engine:
        for _ in range(2):
            plain, adapted = await ask(engine), await ask(engine, adapter="other")
            assert [one.token_ids for one in plain] == qwen.expected
            for chat, one in zip(CHATS, adapted):
                prompt = await engine.encode_chat(message(chat))
                assert one.token_ids == answer("qwen3-vl", merged, prompt.token_ids, chat)
        assert computed(engine) == 6  # those without an adapter
    assert adapted[0].token_ids != plain[0].token_ids


async def test_new_weights_see_anew(qwen: Seeing, tmp_path: Path) -> None:
    other = other_numbers(qwen.folder, tmp_path / "other")
    async with aengine.Engine(str(other), device="cpu", kv_cache_gib=0.02, progress=False) as engine:
        expected = [one.token_ids for one in await ask(engine)]
    assert expected[0] != qwen.expected[0]
    async with qwen.engine() as engine:
        prompt = await engine.encode_chat(message(CHATS[0]))
        assert [one.token_ids for one in await ask(engine)] == qwen.expected
        await engine.reload(other)
        assert [one.token_ids for one in await ask(engine)] == expected
        stream = await engine.submit(prompt.token_ids, images=prompt.images, max_tokens=NEW, **GREEDY)
        drawn = [token for fragment in await _read(stream) for token in fragment.token_ids]
        assert tuple(drawn) == expected[0]  # a prompt of before


async def test_a_device_that_slept_has_no_embeddings(qwen: Seeing) -> None:
    async with qwen.engine(sleep_mode=True) as engine:
        before = await ask(engine)
        seen = computed(engine)
        await engine.sleep()
        await engine.wake_up()
        assert [one.token_ids for one in await ask(engine)] == [one.token_ids for one in before] == qwen.expected
        assert computed(engine) == 2 * seen


async def _read(stream: Any) -> list[aengine.Fragment]:
    found = []
    while fragments := await stream.take():
        found += fragments
    return found


async def test_pages_after_images_are_not_found_by_another_process(qwen: Seeing, tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"page_size": 4, "num_pages": 30, "max_model_len": 112}
    knobs |= {"host_cache_gib": 0.01, "disk_cache_dir": str(tmp_path / "disk")}
    first, second = CHATS[0], CHATS[4]  # the first image of both has the same number of tokens
    async with qwen.engine(**knobs) as engine:
        bring_whatever_there_is(engine)
        for _ in range(3):
            for chat in (first, CHATS[2]):
                await ask(engine, [chat])
                await all_copied(engine)
        assert engine.stats().disk_bytes > 0
    async with qwen.engine(**knobs) as engine:  # the first number now belongs to another image
        bring_whatever_there_is(engine)
        [two] = await ask(engine, [second])
        assert two.token_ids == qwen.expected[4]
        assert two.usage.cached_tokens == 4  # the text before the image
        [text] = await ask(engine, [CHATS[2]])
        assert text.usage.cached_tokens == 40


async def test_logprobs_of_prompts(qwen: Seeing) -> None:
    chat = CHATS[0]
    async with qwen.engine(max_step_tokens=16, max_num_seqs=8) as engine:
        prompt = await engine.encode_chat(message(chat))
        [completion] = await ask(engine, [chat], prompt_logprobs=0)
    inputs = processed("qwen3-vl", [part for part in chat if not isinstance(part, str)])
    ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        logits = qwen.model(input_ids=ids, mm_token_type_ids=(ids == 120).long(), **inputs).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    scores = completion.choices[0].prompt_logprobs
    assert scores is not None
    found = torch.tensor([score.logprob for score in scores if score is not None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


async def test_embeddings_that_are_not_kept_are_computed_again(qwen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_memory, "KEPT_BYTES", 1)
    async with qwen.engine(max_step_tokens=7, max_num_seqs=7) as engine:
        encoder: Any = engine._ready().runtime.runner._executor._images  # type: ignore[attr-defined]
        width = encoder._spec.tower.width
        encoder._kept = KeptEmbeddings(40, width, torch.float32, torch.device("cpu"))  # as long as the largest image
        for _ in range(2):
            for chat, expected in zip(CHATS, qwen.expected):
                [one] = await ask(engine, [chat])
                assert one.token_ids == expected
            engine.flush_cache()
        assert computed(engine) == 13  # six differ; one of seven begins in the cache, which ends within the image


async def test_streams_beside_which_a_tower_takes_several_steps(qwen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = ImageCost(50.0, 0.0, blocks=3)  # for each block more than a step with decodes has time for
    monkeypatch.setattr(start_torch, "image_cost", lambda model: cost)
    parts: list[tuple[int, bool]] = []  # blocks, and whether the step has a prompt
    advance = ImageEncoder.advance

    def noted(encoder: ImageEncoder, plan: StepPlan) -> None:
        parts.extend((work.blocks, bool(plan.prefill)) for work in plan.encodings)
        advance(encoder, plan)

    monkeypatch.setattr(ImageEncoder, "advance", noted)
    async with qwen.engine(page_size=4, max_mixed_tokens=128) as engine:
        stream = await engine.submit_chat(message(CHATS[-1]), max_tokens=480, **GREEDY)
        assert await stream.take()  # it draws until it is aborted, or for long
        assert [one.token_ids for one in await ask(engine)] == qwen.expected
        stream.abort()
        assert computed(engine) == 6
    assert {blocks for blocks, _ in parts} == {0, 1}


async def test_text_alone_calls_no_tower(qwen: Seeing) -> None:
    async with qwen.engine() as engine:
        [completion] = await ask(engine, CHATS[-1:])
        assert completion.token_ids == qwen.expected[-1]
        assert computed(engine) == 0


async def test_the_next_turn_computes_no_image(qwen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = image_reading.decode_image
    monkeypatch.setattr(image_reading, "decode_image", lambda *args: decoded.append(1) or decode(*args))
    async with qwen.engine(page_size=4) as engine:
        chat = message(CHATS[1])
        first = await engine.chat(chat, max_tokens=NEW, **GREEDY)
        before, known = computed(engine), first.usage.prompt_tokens
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "w3 w4"}]
        second = await engine.chat(chat, max_tokens=NEW, **GREEDY)
        assert computed(engine) == before == 1
        assert second.usage.cached_tokens >= known - 4
        assert decoded == [1]
        prompt = await engine.encode_chat(chat)
        assert second.token_ids == answer("qwen3-vl", qwen.model, prompt.token_ids, CHATS[1], NEW)
