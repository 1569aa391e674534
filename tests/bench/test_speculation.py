"""The benchmark of speculation runs on a CPU, and tells the times of each kind of step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation
from bench.speculation import step_times


def test_kinds_of_steps_are_told_apart_and_draws_belong_to_their_steps(tmp_path: Path) -> None:
    def event(milliseconds: float, tid: int = 2, **counts: int) -> dict[str, object]:
        return {"name": "x", "ph": "X", "pid": 1, "tid": tid, "ts": 0, "dur": 1e3 * milliseconds, "args": counts}

    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "aengine"}},
        event(9.0, decode=0, drafts=0, prompt_tokens=512),
        event(2.0, decode=70, drafts=140, prompt_tokens=0),
        event(1.0, draws=210),
        event(99.0, tid=1, decode=70, drafts=140, prompt_tokens=0),  # of the loop
        event(5.0, decode=100, drafts=200, prompt_tokens=0),
        event(6.0, decode=64, drafts=0, prompt_tokens=100),
    ]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(events))
    assert step_times(path) == {
        (0, 0.0, True): {"steps": 1, "ms": 9.0},
        (64, 0.0, True): {"steps": 1, "ms": 6.0},
        (64, 2.0, False): {"steps": 2, "ms": 4.0},
    }


@pytest.mark.slow
def test_it_runs_and_reports_steps_with_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figures.jsonl"
    monkeypatch.setattr(speculation, "OUTPUT", 16)
    monkeypatch.setattr(speculation, "SETTLED", 8)
    arguments = ["--shape", "30m", "--streams", "2", "--runs", "1", "--steps", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["speculation.py", *arguments])
    speculation.main()
    results = [json.loads(line) for line in out.read_text().splitlines()]
    speeds = [one["figures"]["tokens_per_second"] for one in results if "streams" in one["case"]]
    assert len(speeds) == 2
    assert min(speeds) > 0
    verified = {one["case"]["proposer"]: one["case"]["verified"] for one in results if "verified" in one["case"]}
    assert verified["off"] == 0
    assert verified["ngram"] > 0
