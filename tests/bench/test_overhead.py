"""The engine without a model still makes every token that is asked for."""

from __future__ import annotations

import asyncio

from bench.overhead import run


def test_a_batch_runs_to_its_end() -> None:
    assert asyncio.run(run(batch=2, tokens=8)) > 0
