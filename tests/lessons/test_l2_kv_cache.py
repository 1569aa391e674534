"""Lesson 2: the KV cache. Keys and values of old tokens never change: keep them, and compute only the new token.

A prompt of p tokens and 20 drawn ones cost p + 19 tokens of work: the last drawn token is never fed.

Read: aengine/cache/kv.py, aengine/attention/base.py, aengine/attention/torch_backend.py.
"""

from __future__ import annotations

import pytest

from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.paper import feed, pool_for


def test_prefill_once_then_one_token_at_a_time(decoder: Decoder, reference: Reference) -> None:
    kv = pool_for(decoder, num_pages=2, page_size=64)
    logits = feed(decoder, kv, [1], 0, reference.prompt_ids)
    work = length = len(reference.prompt_ids)
    output = [int(logits.argmax())]
    while len(output) < NEW_TOKENS:
        logits = feed(decoder, kv, [1], length, output[-1:])
        work, length = work + 1, length + 1
        output.append(int(logits.argmax()))
    assert output == reference.output_ids
    assert work == len(reference.prompt_ids) + NEW_TOKENS - 1


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_may_come_in_chunks(decoder: Decoder, reference: Reference, chunk: int) -> None:
    whole, pieces = (pool_for(decoder, num_pages=2, page_size=64) for _ in range(2))
    expected = feed(decoder, whole, [1], 0, reference.prompt_ids)
    for start in range(0, len(reference.prompt_ids), chunk):
        logits = feed(decoder, pieces, [1], start, reference.prompt_ids[start : start + chunk])
    assert (logits - expected).abs().max() < 1e-4
