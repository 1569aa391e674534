"""Lesson 7: lookahead. Step N+1 is planned and launched before the tokens of step N are known.

Lengths, positions and pages are known in advance. The ids are not; they stay on the device. A request that ends by
length gets no extra step. A request that ends by a stop token gets one extra step, whose token is dropped.

Read: aengine/engine/loop.py, aengine/scheduling/flight.py, aengine/runtime/step/rows.py.
"""

from __future__ import annotations

import pytest

import aengine
from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, PROMPT, Reference
from tests.lessons.rig import Rig


@pytest.mark.parametrize("depth", [0, 1])
def test_the_ids_do_not_depend_on_it(decoder: Decoder, reference: Reference, depth: int) -> None:
    rig = Rig(decoder)
    ours = rig.add(reference.prompt_ids, NEW_TOKENS)
    rig.run(depth)
    assert ours.output == reference.output_ids
    assert len(rig.plans) == NEW_TOKENS  # no step too many: the end by length is known in advance


def test_a_stop_token_overruns_by_one_step(decoder: Decoder, reference: Reference) -> None:
    stop = reference.output_ids[7]
    drawn = reference.output_ids.index(stop) + 1
    rig = Rig(decoder)
    ours = rig.add(reference.prompt_ids, NEW_TOKENS, stop_ids=(stop,))
    rig.run(depth=1)
    assert ours.output == reference.output_ids[:drawn]
    assert len(rig.plans) == drawn + 1
    assert rig.scheduler.idle


@pytest.mark.anyio
@pytest.mark.parametrize("lookahead", [False, True])
async def test_the_engine_streams_it(reference: Reference, lookahead: bool) -> None:
    async with aengine.Engine(device="cpu", lookahead=lookahead, kv_cache_gib=0.1) as engine:
        fragments = [
            fragment
            async for fragment in engine.generate(PROMPT, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        ]
    assert [token for fragment in fragments for token in fragment.token_ids] == reference.output_ids
    assert "".join(fragment.text for fragment in fragments) == reference.text
