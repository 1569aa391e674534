"""Lesson 1: the model. Token ids go in, logits come out. The likeliest token is appended, and all tokens go in again.

Nothing is kept between two tokens: 20 tokens after a prompt of p tokens cost p + (p + 1) + ... + (p + 19) tokens of
work. Every later lesson removes some of this work and must give the same tokens.

Read: aengine/model/decoder.py, aengine/model/blocks/, aengine/model/loading/load.py.
"""

from __future__ import annotations

from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.paper import feed, pool_for


def test_recomputing_everything_gives_the_reference(decoder: Decoder, reference: Reference) -> None:
    kv = pool_for(decoder, num_pages=2, page_size=64)
    tokens = list(reference.prompt_ids)
    work = 0
    for _ in range(NEW_TOKENS):
        logits = feed(decoder, kv, [1], 0, tokens)
        work += len(tokens)
        tokens.append(int(logits.argmax()))
    assert tokens[len(reference.prompt_ids) :] == reference.output_ids
    prompt = len(reference.prompt_ids)
    assert work == sum(range(prompt, prompt + NEW_TOKENS))


def test_the_future_does_not_reach_back(decoder: Decoder, reference: Reference) -> None:
    """Causality: tokens that follow the prompt in the same pass do not change the logits after the prompt."""
    kv = pool_for(decoder, num_pages=3, page_size=64)
    after_prompt = feed(decoder, kv, [1], 0, reference.prompt_ids)
    feed(decoder, kv, [2], 0, [*reference.prompt_ids, 7, 8, 9])
    last = len(reference.prompt_ids) - 1
    again = feed(decoder, kv, [2], last, reference.prompt_ids[-1:])  # over the K and V of the longer pass
    assert (after_prompt - again).abs().max() < 1e-4
