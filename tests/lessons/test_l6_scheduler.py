"""Lesson 6: continuous batching. Many sequences share each step; they come and go between steps.

Long prompts are computed in chunks, in the same steps as other sequences' decodes. When pages run out, the youngest
sequence frees its pages, returns to the queue and resumes later. This must not change any token.

Read: aengine/scheduling/scheduler.py, aengine/scheduling/planning/, aengine/step_plan.py, aengine/runtime/runner.py.
"""

from __future__ import annotations

import pytest

from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.rig import Rig


def crowd(rig: Rig, reference: Reference) -> list[list[int]]:
    """Add eleven other requests of different lengths, and return their prompts."""
    prompts = [[300 + (7 * number + place) % 900 for place in range(3 + 9 * number)] for number in range(11)]
    for number, prompt in enumerate(prompts):
        rig.add(prompt, 5 + 3 * number)
    return prompts


def test_among_others_in_mixed_steps(decoder: Decoder, reference: Reference) -> None:
    rig = Rig(decoder, max_step_tokens=24)
    crowd(rig, reference)
    ours = rig.add(reference.prompt_ids, NEW_TOKENS)
    rig.run()
    assert ours.output == reference.output_ids
    mixed = [plan for plan in rig.plans if plan.decode and plan.prefill]
    assert mixed, "no step carried decodes and prefill together"
    assert all(plan.num_tokens <= 24 for plan in rig.plans)
    assert any(not chunk.samples for plan in rig.plans for chunk in plan.prefill), "no prompt came in chunks"


@pytest.mark.slow
def test_preempted_and_resumed(decoder: Decoder, reference: Reference) -> None:
    rig = Rig(decoder, num_pages=14, page_size=16)
    crowd(rig, reference)
    ours = rig.add(reference.prompt_ids, NEW_TOKENS)  # the youngest is preempted first
    rig.run()
    assert ours.output == reference.output_ids
    assert rig.scheduler.counters.preemptions > 0


def test_a_sequence_ends_at_its_stop_token(decoder: Decoder, reference: Reference) -> None:
    stop = reference.output_ids[7]
    rig = Rig(decoder)
    ours = rig.add(reference.prompt_ids, NEW_TOKENS, stop_ids=(stop,))
    rig.run()
    first = reference.output_ids.index(stop)
    assert ours.output == reference.output_ids[: first + 1]
