"""A run's trace: the spans of the loop, the device and the HTTP side, each once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

import aengine
from aengine import Structured
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.timeline import DEVICE, LOOP, SENDS, ignore_mark
from tests.http.demo_server import DemoEngine
from tests.http.serving import hosting
from tests.test_timeline import spans

pytestmark = pytest.mark.anyio
Track = list[dict[str, Any]]


def tracks(path: Path) -> dict[int, Track]:
    """Return the spans of each track. Spans of a track do not overlap."""
    found: dict[int, Track] = defaultdict(list)
    for span in sorted(spans(path), key=lambda span: float(span["ts"])):
        found[span["tid"]].append(span)
    for track in found.values():
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    return found


def of(track: Track, name: str) -> Track:
    return [span for span in track if span["name"] == name]


def by_step(track: Track, name: str) -> dict[int, dict[str, Any]]:
    return {span["args"]["step"]: span for span in of(track, name)}


async def run(path: Path, device: str, **options: Any) -> aengine.Stats:
    knobs: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_gib": 0.1, "progress": False}
    async with aengine.Engine(device=device, timeline=str(path), **knobs) as engine:
        await asyncio.gather(
            *(engine.complete([300 + row, 301], max_tokens=10, ignore_eos=True, **options) for row in range(4))
        )
        return engine.stats()


async def test_commits_have_the_accepted_drafts(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"kv_cache_gib": 0.1, "progress": False, "timeline": str(tmp_path / "trace.json")}
    whole_demo = Path(aengine.__file__).parent / "demo" / "model"  # with two layers it accepts no draft
    async with aengine.Engine(str(whole_demo), device="cpu", **knobs) as engine:
        await engine.chat([{"role": "user", "content": "What is 12 + 30?"}], max_tokens=20, temperature=0)
        stats = engine.stats()
    commits = of(tracks(tmp_path / "trace.json")[LOOP], "commit")
    assert sum(span["args"]["accepted"] for span in commits) >= stats.accepted_tokens > 0


async def test_every_step_is_recorded_from_its_launch_to_its_delivery(tmp_path: Path) -> None:
    stats = await run(tmp_path / "trace.json", "cpu")
    found = tracks(tmp_path / "trace.json")
    loop, device = found[LOOP], found[DEVICE]
    assert {span["name"] for span in loop} == {"schedule", "launch", "await", "commit", "deliver", "idle"}
    assert sum(span["args"]["count"] for span in of(loop, "deliver")) == stats.generated_tokens == 40
    assert sum(span["args"]["prompt_tokens"] for span in of(loop, "launch")) == stats.prompt_tokens == 8
    assert sum(span["args"]["drafts"] for span in of(loop, "launch")) >= stats.drafted_tokens > 0
    launched, awaited, busy = by_step(loop, "launch"), by_step(loop, "await"), by_step(device, "forward")
    assert len(launched) == stats.steps
    assert set(launched) == set(awaited) == set(busy)
    assert len(of(device, "draw")) == stats.steps
    for step, span in busy.items():
        assert launched[step]["ts"] <= span["ts"]
        assert span["ts"] + span["dur"] <= awaited[step]["ts"] + awaited[step]["dur"]


async def test_masks_are_recorded(tmp_path: Path) -> None:
    stats = await run(tmp_path / "trace.json", "cpu", structured=Structured(regex="[a-z]{10}"))
    loop = tracks(tmp_path / "trace.json")[LOOP]
    assert sum(span["args"]["count"] for span in of(loop, "masks")) >= stats.generated_tokens > 0


async def test_without_the_knob_nothing_is_recorded(engine: aengine.Engine) -> None:
    assert engine.timeline is None
    assert engine._service.loop is not None
    assert engine._service.loop._mark is ignore_mark


async def test_sending_over_http_is_recorded_with_its_size(tmp_path: Path) -> None:
    engine = DemoEngine(timeline=str(tmp_path / "trace.json"))
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _):
        await engine.entered.wait()
        async with httpx2.AsyncClient() as client:
            replies = await asyncio.gather(
                *(
                    client.post(f"http://127.0.0.1:{port}/generate", json={"prompt": "Paris", "max_tokens": 6})
                    for _ in range(3)
                )
            )
    sent = [span for number, track in tracks(tmp_path / "trace.json").items() if number >= SENDS for span in track]
    assert len(of(sent, "start")) == 3
    assert sum(span["args"]["bytes"] for span in of(sent, "body")) == sum(len(reply.content) for reply in replies)


@pytest.mark.gpu
async def test_the_gpu_is_recorded_by_its_events(tmp_path: Path) -> None:
    stats = await run(tmp_path / "trace.json", "cuda")
    found = tracks(tmp_path / "trace.json")
    loop, device = found[LOOP], found[DEVICE]
    awaited = by_step(loop, "await")
    steps = by_step(device, "step")
    assert len(steps) == stats.steps == len(awaited)
    for step, span in steps.items():
        assert span["dur"] > 0
        assert (
            span["ts"] + span["dur"] <= awaited[step]["ts"] + awaited[step]["dur"] + 200
        )  # the difference of the clocks
