"""Equal prefixes have equal keys, whatever follows them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from aengine.ray_serve.routing.prompt import FIRST_BLOCK, Prompt, prompt_from_ids, prompt_from_text, read_prompt

texts = st.binary(max_size=3000)


@given(begin=texts, one=texts, other=texts)
def test_keys_agree_exactly_as_far_as_the_texts_do(begin: bytes, one: bytes, other: bytes) -> None:
    first, second = prompt_from_text(begin + one), prompt_from_text(begin + other)
    common = next(
        (at for at, (a, b) in enumerate(zip(begin + one, begin + other)) if a != b),
        min(len(begin + one), len(begin + other)),
    )
    same = sum(a == b for a, b in zip(first.keys, second.keys))
    assert first.keys[:same] == second.keys[:same]
    assert all(end * 4 <= common for end in first.ends[:same])
    if same < min(len(first.keys), len(second.keys)):
        assert first.ends[same] * 4 + 3 >= common


@given(text=st.binary(min_size=1, max_size=3000))
def test_a_megabyte_has_few_keys_and_ends_rise(text: bytes) -> None:
    prompt = prompt_from_text(text * (2**20 // len(text)))
    assert len(prompt.keys) == len(prompt.ends) < 200
    assert list(prompt.ends) == sorted(set(prompt.ends))
    assert prompt.ends[-1] >= prompt.tokens * 15 // 16 - FIRST_BLOCK


def chat(*contents: str, **fields: object) -> Prompt:
    messages = [{"role": "user", "content": content} for content in contents]
    return read_prompt(json.dumps({"messages": messages, **fields}).encode())


def test_a_chats_next_turn_begins_with_the_keys_of_the_last_one() -> None:
    first, second = chat("a" * 500), chat("a" * 500, "b" * 200, "c" * 300)
    assert len(first.keys) > 5
    assert second.keys[: len(first.keys)] == first.keys
    assert len(second.keys) > len(first.keys)


def test_tools_and_salt_change_keys_and_other_fields_do_not() -> None:
    assert chat("a" * 500, max_tokens=5, stream=True).keys == chat("a" * 500).keys
    assert not set(chat("a" * 500, cache_salt="mine").keys) & set(chat("a" * 500).keys)
    assert not set(chat("a" * 500, tools=[{"type": "function"}]).keys) & set(chat("a" * 500).keys)


def test_adapters_of_one_model_share_no_key_as_they_share_no_pages() -> None:
    sql, law = (set(chat("a" * 500, model=name).keys) for name in ("sql", "law"))
    assert sql
    assert not sql & law
    mine = (
        chat("a" * 500, model=model, cache_salt=salt).keys for model, salt in (("a", "bc"), ("ab", "c"), ("ab", ""))
    )
    assert len(set(mine)) == 3


def test_whether_an_answer_is_streamed_is_known() -> None:
    assert [chat("a", **fields).streamed for fields in ({}, {"stream": False}, {"stream": True})] == [
        False,
        False,
        True,
    ]


def test_a_responses_items_and_a_messages_system_prompt_count() -> None:
    items = [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b" * 500}]

    def response(many: int, **fields: object) -> Prompt:
        return read_prompt(json.dumps({"input": items[:many], **fields}).encode())

    assert len(response(1).keys) > 5
    assert response(2).keys[: len(response(1).keys)] == response(1).keys
    assert not set(response(1, instructions="Be brief.").keys) & set(response(1).keys)
    assert not set(chat("a" * 500, system="Be brief.").keys) & set(chat("a" * 500).keys)
    assert len(read_prompt(json.dumps({"input": "a" * 500}).encode()).keys) > 5


def test_ids_count_as_they_are() -> None:
    ids = list(range(300))
    prompt = read_prompt(json.dumps({"prompt": ids}).encode())
    assert prompt == prompt_from_ids(ids) == read_prompt(json.dumps({"input_ids": ids}).encode())
    assert prompt.tokens == 300
    assert prompt == read_prompt(json.dumps({"prompt": [ids, [1, 2]]}).encode())


def test_a_bad_body_has_no_keys() -> None:
    bad = [b"", b"{", b"[]", b'{"messages": 3}', b'{"prompt": [-1]}', b'{"input_ids": ["a"]}', b'{"prompt": "\\ud800"}']
    assert [read_prompt(body).keys for body in bad] == [()] * len(bad)
    assert read_prompt(b"[" * 100_000).keys == ()
