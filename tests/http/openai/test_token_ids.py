"""`return_token_ids`, `return_tokens_as_token_ids` and `text_offset` in answers."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.rounding import near

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "The capital of France is"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8, "n": 2},
    COMPLETIONS: {"prompt": [PROMPT, "One two"], "temperature": 0, "max_tokens": 8, "n": 2},
}


def whole(demo: httpx2.Client, path: str, **more: Any) -> dict[str, Any]:
    answer = demo.post(path, json={**ASKED[path], **more})
    assert answer.status_code == 200, answer.text
    reported: dict[str, Any] = answer.json()
    return reported


def chunks(demo: httpx2.Client, path: str, **more: Any) -> list[dict[str, Any]]:
    text = demo.post(path, json={**ASKED[path], **more, "stream": True}).text
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]  # without [DONE]


def tokenized(demo: httpx2.Client, **prompt: Any) -> list[int]:
    ids: list[int] = demo.post("/tokenize", json=prompt).json()["tokens"]
    return ids


@pytest.mark.parametrize("path", ASKED)
def test_ids_of_prompt_and_choices_whole_and_streamed(demo: httpx2.Client, path: str) -> None:
    answer = whole(demo, path, return_token_ids=True)
    ids = {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
    assert sum(map(len, ids.values())) == answer["usage"]["completion_tokens"]
    streamed: dict[int, list[int]] = {index: [] for index in ids}
    prompts: dict[int, Any] = {}
    for chunk in chunks(demo, path, return_token_ids=True):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        for where in (choice, chunk):
            if "prompt_token_ids" in where:
                assert prompts.setdefault(choice["index"], where["prompt_token_ids"]) is where["prompt_token_ids"]
    assert streamed == ids
    if path == CHAT:
        expected = tokenized(demo, messages=ASKED[CHAT]["messages"], add_generation_prompt=True)
        assert prompts == {0: expected}
        assert answer["prompt_token_ids"] == expected
    else:
        one, two = (tokenized(demo, prompt=prompt) for prompt in ASKED[COMPLETIONS]["prompt"])
        assert prompts == {0: one, 1: one, 2: two, 3: two}
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [one, one, two, two]
    plain = whole(demo, path)
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in (plain | plain["choices"][0])


def test_tokens_of_logprobs_as_ids(demo: httpx2.Client) -> None:
    requested = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    for choice in whole(demo, COMPLETIONS, logprobs=2, **requested)["choices"]:
        names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    for choice in whole(demo, CHAT, logprobs=True, top_logprobs=2, **requested)["choices"]:
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert all(top["token"].startswith("token_id:") for one in content for top in one["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_into_the_text_that_was_sent(demo: httpx2.Client, stream: bool) -> None:
    """After characters of several tokens, in an echo and in the text after it."""
    prompt = "Été 👋🏽 naïve <|im_end|> is"
    requested = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 6, "ignore_eos": True, "n": 1}
    reported = chunks(demo, COMPLETIONS, **requested) if stream else [whole(demo, COMPLETIONS, **requested)]
    choices = [one["choices"][0] for one in reported]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert text.startswith(prompt)
    assert any("\ufffd" in token for token in tokens)
    for token, offset in zip(tokens, offsets, strict=True):
        hidden = token.startswith("<|") and offset >= len(prompt)
        assert hidden or "\ufffd" in token or text.startswith(token, offset), (token, offset)


def test_offsets_end_with_the_text_before_a_stop_string_of_several_tokens(demo: httpx2.Client) -> None:
    requested = {"prompt": PROMPT, "logprobs": 0, "max_tokens": 8, "n": 1, "ignore_eos": True}
    tokens = whole(demo, COMPLETIONS, **requested)["choices"][0]["logprobs"]["tokens"]
    requested["stop"] = ["".join(tokens[2:6])]
    (choice,) = whole(demo, COMPLETIONS, **requested)["choices"]
    reported = [chunk["choices"][0] for chunk in chunks(demo, COMPLETIONS, **requested)]
    assert "".join(one["text"] for one in reported) == choice["text"] == "".join(tokens[:2])
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [value for one in reported for value in one["logprobs"][name]] == near(choice["logprobs"][name])
