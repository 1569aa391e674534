"""Lesson 9: CUDA graphs. Every decode step is the same few hundred kernels: they are recorded once and replayed.

The graph reads from the device which rows decode, their last tokens, lengths and pages. A batch is padded to the next
recorded size with rows that write into page 0. This must not change any token.

Read: aengine/runtime/cuda/capture.py, aengine/runtime/cuda/decode_graphs.py.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

import aengine
from tests.lessons.conftest import NEW_TOKENS, PROMPT, Reference

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


@pytest.mark.parametrize("cuda_graphs", [False, True])
async def test_replayed_steps_give_the_reference(reference: Reference, cuda_graphs: bool) -> None:
    async with aengine.Engine(
        device="cuda", dtype="float32", cuda_graphs=cuda_graphs, kv_cache_gib=1.0, max_num_seqs=16
    ) as engine:
        others = [[300 + number] * (1 + 5 * number) for number in range(10)]  # a batch that needs padding
        results = await asyncio.gather(
            engine.complete(PROMPT, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True),
            *(engine.complete(prompt, max_tokens=15, temperature=0.8, seed=3) for prompt in others),
        )
        engine.check_integrity()
    assert list(results[0].token_ids) == reference.output_ids
    assert results[0].text == reference.text


def test_every_batch_is_padded_to_a_size_that_costs_little_more() -> None:
    """Up to 64 rows, a step mostly reads weights. Beyond, every row takes additional time."""
    from aengine.runtime.cuda.decode_shapes import graph_sizes

    sizes = graph_sizes(512)
    assert sizes[0] == 1
    assert sizes[-1] == 512
    for smaller, larger in itertools.pairwise(sizes):
        assert (larger - (smaller + 1)) / larger <= (0.13 if larger > 64 else 0.25)
    assert {16, 32, 64, 128} <= set(sizes)  # more rows use other kernels
