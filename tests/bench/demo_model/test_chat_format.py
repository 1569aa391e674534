"""The chat template: what it writes, and that transformers writes the same."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bench.demo_model.chat_format import CHAT_TEMPLATE, Message, TemplateError, assistant, render, system, user
from bench.demo_model.evaluate import MODEL

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <eine> 'Stadt' & mehr 🌦",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, list[Message]] = {
    "one question": [user("hi")],
    "system": [system("Be brief."), user("hi"), assistant("Hello!"), user("again")],
    "calls": [
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "1"},
        {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]},
    ],
    "thoughts": [user("2 + 2"), assistant("<think>\nhm\n</think>\n\n4"), user("sure?")],
    "parts": [
        user("unused"),
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    "images": [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]},
        assistant("A red circle."),
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}, {"type": "image"}]},
    ],
}


@pytest.fixture(scope="module")
def auto() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_transformers_renders_the_same(
    auto: AutoTokenizer, chat: list[Message], tools: tuple[dict[str, object], ...], thinking: bool
) -> None:
    for prompt in (False, True):
        theirs = auto.apply_chat_template(
            chat,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            enable_thinking=thinking,
        )
        assert theirs == render(chat, tools=tools, thinking=thinking, add_generation_prompt=prompt)


def test_transformers_reads_the_same_ids(auto: AutoTokenizer) -> None:
    text = render(CHATS["calls"], tools=[TOOL], thinking=True, add_generation_prompt=True)
    ours = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert auto(text)["input_ids"] == ours
    assert (auto.eos_token, auto.pad_token, auto.bos_token) == ("<|im_end|>", "<|endoftext|>", None)


def test_the_images_of_a_message_come_before_its_text() -> None:
    text = render(CHATS["images"])
    assert "<|im_start|>user\n<|image_pad|>What is this?<|im_end|>" in text
    assert "<|im_start|>user\n<|image_pad|><|image_pad|>And this?<|im_end|>" in text


def test_a_turn_is_marked_on_both_sides() -> None:
    assert render([user("hi")], add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_turn_holds_message_tools_and_the_request_to_think() -> None:
    text = render([system("Be brief."), user("hi")], tools=[TOOL], thinking=True)
    head = text[: text.index("<|im_end|>")]
    assert head.startswith("<|im_start|>system\nBe brief.\n\nTools:\n{")
    assert json.dumps(TOOL["function"], ensure_ascii=False) in head
    assert head.endswith("Think between <think> and </think> before you answer.")


def test_calls_are_repeated_as_the_model_writes_them() -> None:
    text = render(CHATS["calls"])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert f"assistant\n{call}\n{call}<|im_end|>" in text
    assert f"assistant\nOne moment.\n{call}<|im_end|>" in text
    as_text = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    assert call in render([{"role": "assistant", "content": "", "tool_calls": [as_text]}])


def test_the_next_turn_extends_the_last_one_exactly() -> None:
    first = render([user("hi")], add_generation_prompt=True) + "Hello!<|im_end|>\n"
    assert render([user("hi"), assistant("Hello!"), user("more")], add_generation_prompt=True).startswith(first)


def test_thoughts_are_not_repeated() -> None:
    assert "hm" not in render(CHATS["thoughts"])
    assert "<|im_start|>assistant\n4<|im_end|>" in render(CHATS["thoughts"])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "wizard", "content": "x"}, "unknown role wizard"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "text and images only"),
    ],
)
def test_what_the_model_cannot_read_is_refused(message: Message, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render([message])


def test_a_developer_message_is_a_system_message() -> None:
    assert render([{"role": "developer", "content": "x"}]) == render([system("x")])


def test_the_shipped_template_is_this_one() -> None:
    config = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
