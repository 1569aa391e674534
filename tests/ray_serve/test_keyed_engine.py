"""Equal replicas get equal speeds, although measurements differ."""

from __future__ import annotations

from math import isclose

import pytest

import aengine
from aengine.ray_serve.keyed_engine import coarse, measure_speed

pytestmark = pytest.mark.anyio


def test_measurements_that_differ_by_little_are_one_and_none_is_far_off() -> None:
    found = {coarse(1e-4 * 1.02**step) for step in range(100)}  # a factor of 7
    assert len(found) <= 7
    assert all(any(isclose(1e-4 * 1.02**step, one, rel_tol=0.2) for one in found) for step in range(100))


@pytest.mark.slow
async def test_an_engine_is_measured_and_its_cache_left_empty() -> None:
    async with aengine.Engine(device="cpu", torch_threads=1, progress=False) as engine:
        speed = await measure_speed(engine)
        assert 0 < speed.prefill < speed.step < 10
        assert speed.prefill == coarse(speed.prefill)
        assert speed.step == coarse(speed.step)
        assert engine.stats().pages_cached == 0
