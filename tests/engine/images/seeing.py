"""Small random models that see, with a tokenizer and a chat template, and what transformers answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import aengine
from aengine.types import Completion
from tests.images.files import encoded
from tests.model.towers.checkpoints import picture, processed, write_seeing

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
NEW = 20
_SPECIAL = {
    "qwen": {116: "<|im_start|>", 117: "<|im_end|>", 120: "<|image_pad|>", 121: "<|vision_start|>", 122: "<|v_end|>"},
    "mist": {116: "[INST]", 117: "[/INST]", 118: "[IMG_BREAK]", 119: "[IMG_END]", 120: "[IMG]"},
    "gemm": {116: "<start>", 117: "<end>", 120: "<image>", 121: "<boi>", 122: "<eoi>"},
}
_IMAGE = {"qwen": "<|vision_start|><|image_pad|><|v_end|>", "mist": "[IMG]", "gemm": "<image>"}


LAYERS = "gemma4-layers"  # each layer of this model reads a second embedding


def base(case: str) -> str:
    return "gemma4" if case == LAYERS else case


def write_model(case: str, folder: Path, **text: object) -> Any:
    """Write a checkpoint with a tokenizer of 128 words. Returns transformers' model. text: changes its decoder."""
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128} if case == LAYERS else {}
    model = write_seeing(base(case), folder, **sizes, **text)
    with torch.no_grad():
        model.get_output_embeddings().weight[120] = 0.0  # transformers fails if a model draws this token
    model.save_pretrained(folder)
    special = _SPECIAL[case[:4]]
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(min(special))}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for i in range(min(special), 128):
        token = AddedToken(special.get(i, f"w{i}"), special=i in special, normalized=False)
        (tokenizer.add_special_tokens if i in special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}BEGIN {% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }} {% endif %}"
        "{% endfor %}{% endif %} END{% endfor %}"
    )
    for name, text in (
        ("BEGIN", special[116]),
        ("END", special[117]),
        ("IMAGE", "<boi>" if case == "gemma3" else _IMAGE[case[:4]]),
    ):
        template = template.replace(name, text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model


Chat = Sequence[str | Image.Image]  # the parts of one message


def message(chat: Chat) -> list[dict[str, Any]]:
    """Return a chat of one message. Its images are PNGs."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": encoded(part, "PNG")}
        for part in chat
    ]
    return [{"role": "user", "content": parts}]


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


CHATS: list[Chat] = [
    [words(5, 9, 3, 7), picture(40, 24, 1), words(8, 2), picture(24, 64, 2), picture(30, 30, 3), words(4, 4, 1)],
    [picture(64, 40, 4), words(11, 12, 13, 14, 15)],
    [words(*range(20, 60)), picture(24, 24, 5), words(6)],
    [words(5, 9, 3, 7), picture(40, 24, 1), words(8, 3)],  # the same begin as the first
    [words(5, 9, 3, 7), picture(40, 24, 9), words(8, 2)],  # another image of the same size
    [words(5, 9, 3, 7, 8, 2)],
]


@dataclass(frozen=True, slots=True)
class Seeing:
    """A checkpoint, and the answers of transformers to `CHATS`."""

    case: str
    folder: Path
    model: Any
    expected: list[tuple[int, ...]]

    def engine(self, **knobs: Any) -> aengine.Engine:
        defaults = {"device": "cpu", "max_num_seqs": 8, "kv_cache_gib": 0.02, "max_model_len": 512, "progress": False}
        return aengine.Engine(model=str(self.folder), **{**defaults, **knobs})


def make_seeing(case: str, folder: Path, **text: object) -> Seeing:
    model = write_model(case, folder, **text)
    seeing = Seeing(case, folder, model, [])
    for chat, token_ids in zip(CHATS, asyncio.run(_encode(seeing)), strict=True):
        seeing.expected.append(answer(case, model, token_ids, chat))
    return seeing


async def _encode(seeing: Seeing) -> list[list[int]]:
    async with seeing.engine() as engine:
        return [(await engine.encode_chat(message(chat))).token_ids for chat in CHATS]


def answer(case: str, model: Any, token_ids: Sequence[int], chat: Chat, count: int = NEW) -> tuple[int, ...]:
    """Return what transformers continues a prompt with, greedily."""
    images = [part for part in chat if not isinstance(part, str)]
    sizes = {"mist": ["image_sizes"], "qwen": ["image_grid_thw"], "gemm": ["image_position_ids"]}[case[:4]]
    sizes = [] if case == "gemma3" else sizes
    inputs = {name: processed(base(case), images)[name] for name in ("pixel_values", *sizes)} if images else {}
    known = list(token_ids)
    made: list[Any] = []  # the tower computes the images once
    compute = model.model.get_image_features

    def once(*args: Any, **options: Any) -> Any:
        if not made:
            made.append(compute(*args, **options))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "get_image_features", once)
        _draw(case, model, known, inputs, count)
    return tuple(known[len(token_ids) :])


def _draw(case: str, model: Any, known: list[int], inputs: dict[str, Any], count: int) -> None:
    """Add the next tokens to those that are known."""
    for _ in range(count):
        ids = torch.tensor([known])
        of_tokens = "token_type_ids" if case == "gemma3" else "mm_token_type_ids"
        kinds = {} if case.startswith("mistral") else {of_tokens: (ids == 120).long()}
        with torch.no_grad():
            logits = model(input_ids=ids, **inputs, **kinds, use_cache=False).logits
        known.append(int(logits[0, -1].argmax()))


async def ask(engine: aengine.Engine, chats: Sequence[Chat] = CHATS, **options: Any) -> list[Completion]:
    """Return the answers to chats that run at once.

    No step starts before all chats wait. Otherwise it would depend on the machine which of them run together, because
    their images are decoded in other threads.
    """
    options = {"max_tokens": NEW, **GREEDY, **options}
    loop = engine._serving().loop
    await loop.pause()
    try:
        answers = asyncio.gather(*(engine.chat(message(chat), **options) for chat in chats))
        with anyio.fail_after(60):
            while engine.stats().waiting < len(chats) and not answers.done():  # noqa: ASYNC110 - the engine has no such event
                await anyio.sleep(0.001)
    finally:
        loop.resume()
    completions = await answers
    engine.check_integrity()
    return completions


def computed(engine: aengine.Engine) -> int:
    """Return how many images the tower has computed."""
    count: int = engine._ready().runtime.runner._executor._images.computed  # type: ignore[attr-defined]
    return count
