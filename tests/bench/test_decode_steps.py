"""Decode steps are timed in the engine, and told beside their bytes like every other figure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import aengine
from aengine.model.config import ModelConfig
from bench.decode_steps import READ, step_seconds, tell_steps
from bench.results import Report, table
from bench.shapes import write_config
from bench.step_bytes import step_bytes

pytestmark = pytest.mark.anyio
TOKENS = 8


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[aengine.Engine]:
    write_config(tmp_path, "30m", context=512)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 10_001, "num_hidden_layers": 2}))
    async with aengine.Engine(str(tmp_path), load_format="dummy", device="cpu", progress=False) as engine:
        yield engine
        engine.check_integrity()


@pytest.mark.slow
async def test_a_row_for_each_number_of_streams(engine: aengine.Engine, tmp_path: Path) -> None:
    config, report = ModelConfig.from_folder(tmp_path), Report("trial")
    await tell_steps(engine, config, {"shape": "30m"}, report, streams=[1, 3], runs=2, temperature=1.0, tokens=TOKENS)
    for result, streams in zip(report.results, (1, 3), strict=True):
        limit = 1e3 * step_bytes(config, streams, 128 + TOKENS // 2, torch.bfloat16, torch.bfloat16) / READ
        step = result.figures["step_ms"]
        assert step
        assert result.case == {"shape": "30m", "streams": streams}
        assert result.figures["tok_s"] == pytest.approx(1e3 * streams / step, rel=1e-3)
        assert result.figures["of_limit"] == pytest.approx(limit / step, rel=1e-3)
        assert result.reference["limit_ms"] == pytest.approx(limit)
        assert len(result.runs["step_ms"]) == 2  # the first of three warmed up
    assert table(report.results).splitlines()[0] == (
        "| shape | streams | tok s | step ms | of limit | limit tok s | limit ms | step gb |"
    )


async def test_only_steps_in_which_all_streams_decode_are_timed(
    engine: aengine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last first token on there is a step for each further token, and at most one that is on its way."""
    stats, seen = engine.stats, list[int]()

    def noted() -> aengine.Stats:
        found = stats()
        seen.append(found.steps)
        return found

    monkeypatch.setattr(engine, "stats", noted)
    assert await step_seconds(engine, 2, run=0, temperature=1.0, tokens=TOKENS) > 0
    assert TOKENS - 2 <= seen[1] - seen[0] <= TOKENS
