"""The trace file is valid at any time, bounded, and never delays the engine."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aengine.errors import ConfigError
from aengine.step_plan import PrefillChunk, StepPlan
from aengine.timeline import DEVICE, FLUSH_EVENTS, LOOP, Timeline


def spans(path: Path) -> list[dict[str, Any]]:
    """Return the trace's spans, after checking that each has the fields of a complete event."""
    events = json.loads(path.read_bytes())
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"step loop", "device"}
    found = [event for event in events if event["ph"] == "X"]
    for event in found:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert all(isinstance(count, int) for count in event["args"].values())
    return found


def test_it_is_valid_before_between_and_after(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    assert spans(path) == []
    plan = StepPlan(
        step=7, new_rows=[], new_pages=[], decode=[1, 2], prefill=[PrefillChunk(0, 0, [1] * 5, True)], page_copies=[]
    )
    timeline.mark("launch", plan)
    timeline.flush()
    (launch,) = spans(path)
    assert launch["args"] == {"step": 7, "decode": 2, "drafts": 0, "prompt_tokens": 5, "new": 0}
    timeline.mark("deliver", count=3)
    timeline.at_close(lambda: timeline.span(DEVICE, "last", 0.0, 1.0, {}))
    timeline.close()
    timeline.mark("too late")
    timeline.close()
    told = json.loads(path.read_bytes())[-2:]
    assert [event["name"] for event in told] == ["deliver", "last"]
    assert told[0]["args"] == {"count": 3}
    assert told[0]["ts"] == pytest.approx(launch["ts"] + launch["dur"], abs=0.01)


def test_times_are_microseconds_since_its_beginning(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    begin = time.perf_counter()
    timeline.span(DEVICE, "step", begin, begin + 0.25, {})
    timeline.close()
    (span,) = spans(tmp_path / "trace.json")
    assert span["dur"] == pytest.approx(250_000, abs=1)
    assert span["ts"] < 1e6


def test_two_files_hold_the_newest_of_a_long_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, most_bytes=400_000)
    for number in range(10 * FLUSH_EVENTS):
        timeline.mark("commit", count=number)
    timeline.close()
    older, newer = spans(tmp_path / "trace.1.json"), spans(path)
    numbers = [span["args"]["count"] for span in older + newer]
    assert numbers == list(range(numbers[0], 10 * FLUSH_EVENTS))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 400_000 + 2 * FLUSH_EVENTS * 120
    assert len(list(tmp_path.iterdir())) == 2


def test_a_worker_tells_while_the_loop_writes(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    each = 3 * FLUSH_EVENTS

    def work() -> None:
        for _ in range(each):
            timeline.span(DEVICE, "forward", time.perf_counter(), time.perf_counter(), {})

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(each):
        timeline.mark("commit")
    worker.join()
    timeline.close()
    tracks = [span["tid"] for span in spans(tmp_path / "trace.json")]
    assert (tracks.count(LOOP), tracks.count(DEVICE)) == (each, each)


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeline: .*nowhere.*cannot be written"):
        Timeline(tmp_path / "nowhere" / "trace.json")


def test_a_failure_to_write_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    (tmp_path / "trace.json").unlink()
    with caplog.at_level(logging.ERROR, "aengine"):
        for _ in range(2 * FLUSH_EVENTS):
            timeline.mark("commit")
        timeline.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the timeline cannot be written and ends here"
    ]
