"""Lesson 4: the sampler. It draws one token from each row of logits, with that row's own parameters.

Read: aengine/sampling/sampler.py, aengine/sampling/draw.py, aengine/requests/sampling_params.py.
"""

from __future__ import annotations

import torch

from aengine.model.decoder import Decoder
from aengine.requests.sampling_params import SamplingParams
from aengine.sampling.sampler import Sampler
from aengine.step_plan import NewRow
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.paper import feed, pool_for


def new_row(row: int, prompt: list[int], params: SamplingParams, seed: int = 0) -> NewRow:
    return NewRow(
        row=row, params=params, seed=seed, stop_ids=(), prompt_len=len(prompt), tokens=prompt, length=0, pages=[]
    )


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int], position: int) -> list[int]:
    index = torch.tensor(rows)
    draws = sampler.sample(logits.clone(), rows, index, torch.full_like(index, position))
    return draws.token_ids.tolist()


def test_temperature_zero_gives_the_reference(decoder: Decoder, reference: Reference) -> None:
    sampler = Sampler(1, decoder.config.vocab_size, torch.device("cpu"))
    sampler.set_rows([new_row(0, reference.prompt_ids, SamplingParams(temperature=0))])
    kv = pool_for(decoder, num_pages=2, page_size=64)
    length = len(reference.prompt_ids)
    logits = feed(decoder, kv, [1], 0, reference.prompt_ids)
    output = draw(sampler, logits[None], [0], length)
    while len(output) < NEW_TOKENS:
        logits = feed(decoder, kv, [1], length, output[-1:])
        length += 1
        output += draw(sampler, logits[None], [0], length)
    assert output == reference.output_ids


def test_a_seed_fixes_the_draw_whatever_else_is_in_the_batch(decoder: Decoder, reference: Reference) -> None:
    kv = pool_for(decoder, num_pages=2, page_size=64)
    logits = feed(decoder, kv, [1], 0, reference.prompt_ids)
    sampler = Sampler(4, decoder.config.vocab_size, torch.device("cpu"))
    hot = SamplingParams(temperature=2.0)
    sampler.set_rows(
        [
            new_row(0, reference.prompt_ids, hot, seed=1),
            new_row(1, reference.prompt_ids, SamplingParams(temperature=0)),
            new_row(2, reference.prompt_ids, hot, seed=2),
            new_row(3, reference.prompt_ids, hot, seed=1),
        ]
    )
    position = len(reference.prompt_ids)
    together = draw(sampler, logits.expand(4, -1), [0, 1, 2, 3], position)
    assert together[1] == reference.output_ids[0]
    assert together[0] == together[3] == draw(sampler, logits[None], [0], position)[0]
