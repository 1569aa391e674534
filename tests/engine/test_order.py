"""With many rows, the next step is launched before the last one's tokens are delivered; with few rows, after."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

import aengine
from aengine.engine.loop import DELIVERY_SLICE
from aengine.step_plan import StepPlan, StepResult
from aengine.timeline import LOOP
from bench.overhead import NullRunner, NullStep, null_runtime
from tests.engine.conftest import idle
from tests.test_timeline import spans

pytestmark = pytest.mark.anyio


def told(path: Path, rows: int) -> list[tuple[str, str]]:
    """Return the event after each commit of the given number of rows."""
    loop = sorted((span for span in spans(path) if span["tid"] == LOOP), key=lambda span: float(span["ts"]))
    return [
        (behind["name"], after["name"])
        for (commit, behind), (_, after) in pairwise(pairwise(loop))
        if commit["name"] == "commit" and commit["args"]["count"] == rows
    ]


@pytest.mark.parametrize(
    ("rows", "order"),
    [(DELIVERY_SLICE, ("deliver", "schedule")), (DELIVERY_SLICE + 1, ("schedule", "launch"))],
)
async def test_many_tokens_are_delivered_during_two_steps(tmp_path: Path, rows: int, order: tuple[str, str]) -> None:
    path = tmp_path / "trace.json"
    async with aengine.Engine(start=null_runtime, max_num_seqs=rows, timeline=str(path), progress=False) as engine:
        answers = [engine.complete([300 + row], max_tokens=20, temperature=0, ignore_eos=True) for row in range(rows)]
        found = await asyncio.gather(*answers)
    assert all(len(one.choices[0].token_ids) == 20 for one in found)
    steady = told(path, rows)[1:-2]
    assert len(steady) > 10
    assert set(steady) == {order}


class Cycling(NullRunner):
    """Draws ten tokens in turn, the same for every row."""

    def launch(self, plan: StepPlan) -> NullStep:
        draws = len(plan.sampled_rows)
        return NullStep(plan, StepResult([400 + plan.step % 10] * draws, [True] * draws, None))


async def test_a_stop_string_ends_rows_that_two_steps_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.overhead.NullRunner", Cycling)
    rows = DELIVERY_SLICE + 6
    async with aengine.Engine(start=null_runtime, max_num_seqs=rows, progress=False) as engine:
        whole = (await engine.complete([300], max_tokens=40, temperature=0, ignore_eos=True)).choices[0].text
        stop = whole[len(whole) // 2 :][:4]
        answers = [
            engine.complete([300 + row], max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
            for row in range(rows)
        ]
        found = [one.choices[0] for one in await asyncio.gather(*answers)]
        await idle(engine)
    for one in found:
        assert (one.finish_reason, one.stop_string) == ("stop", stop)
        assert stop not in one.text
        assert len(one.token_ids) <= 10 + len(stop)
