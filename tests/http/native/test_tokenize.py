"""`POST /tokenize` and `POST /detokenize`, with the demo model's tokenizer."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.http.demo_server import demo_server
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

TEXT = "The capital of France is Paris. 👋"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_there_and_back(demo: httpx2.Client) -> None:
    answer = demo.post("/tokenize", json={"prompt": TEXT}).json()
    assert answer["count"] == len(answer["tokens"]) > 5
    assert answer["max_model_len"] == demo.get("/v1/models").json()["data"][0]["max_model_len"]
    assert answer["token_strs"] is None
    assert demo.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


def test_the_tokens_as_the_vocabulary_writes_them(demo: httpx2.Client) -> None:
    answer = demo.post("/tokenize", json={"prompt": "a Paris", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "ĠParis"]


def test_a_chat_is_counted_as_it_would_be_sent(demo: httpx2.Client) -> None:
    tokens = demo.post("/tokenize", json=CHAT).json()["tokens"]
    usage = demo.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).json()["usage"]
    assert len(tokens) == usage["prompt_tokens"]
    closed = demo.post("/tokenize", json=CHAT | {"add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(closed)] == closed
    assert len(closed) < len(tokens)
    written = demo.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    again = demo.post("/tokenize", json={"prompt": written, "add_special_tokens": False}).json()["tokens"]
    assert again == tokens


def test_the_tools_are_counted_too(demo: httpx2.Client) -> None:
    chat = CHAT | {"tools": [TOOL]}
    tokens = demo.post("/tokenize", json=chat).json()["tokens"]
    usage = demo.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()["usage"]
    assert len(tokens) == usage["prompt_tokens"] > len(demo.post("/tokenize", json=CHAT).json()["tokens"])


def test_a_request_may_be_counted_with_all_its_other_fields(demo: httpx2.Client) -> None:
    tokens = demo.post("/tokenize", json=CHAT).json()["tokens"]
    whole = CHAT | {"temperature": 0, "max_tokens": 5, "stream": True, "chat_template": None, "documents": []}
    assert demo.post("/tokenize", json=whole).json()["tokens"] == tokens


def test_a_long_text_does_not_go_through_the_loop(demo: httpx2.Client) -> None:
    text = "one two three " * 2000
    tokens = demo.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert demo.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **CHAT}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "high"}, "reasoning_effort"),
        ("/tokenize", CHAT | {"chat_template": "{{ messages }}"}, "chat_template"),
        ("/tokenize", CHAT | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_invalid_fields_are_refused_by_name(demo: httpx2.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = demo.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.anyio
async def test_ids_beyond_the_embedding_are_written_if_the_tokenizer_knows_them() -> None:
    engine = FakeEngine()
    engine.tokenizer.vocab_size = engine.vocab_size + 3
    async with serving(engine) as server:
        known = await server.post("/detokenize", tokens=[engine.vocab_size + 2])
        unknown = await server.post("/detokenize", tokens=[engine.vocab_size + 3])
    assert (known.status_code, len(known.json()["prompt"])) == (200, engine.vocab_size + 2)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_is_not_found(demo: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    assert demo.post(path, json=body | {"model": "other"}).status_code == 404


def test_the_tokenizers_settings(demo: httpx2.Client) -> None:
    hidden = demo.get("/tokenizer_info")
    assert hidden.status_code == 404
    assert hidden.json()["error"]["message"] == "GET /tokenizer_info: the server's knob tokenizer_info is off"
    with demo_server(tokenizer_info=True) as url:
        info = httpx2.get(f"{url}/tokenizer_info", trust_env=False).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"].startswith("{")
    ids = {entry["content"]: int(token_id) for token_id, entry in info["added_tokens_decoder"].items()}
    assert [ids["<|im_end|>"]] == demo.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
