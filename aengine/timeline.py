"""A Chrome trace of a run: the activities of the step loop, the device and the HTTP side over time.

chrome://tracing and ui.perfetto.dev open it. The file is valid JSON after every write, so that a killed process leaves
a trace too; its newest events may be missing.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from aengine.errors import ConfigError
from aengine.step_plan import StepPlan

log = logging.getLogger("aengine")

MOST_BYTES = 128 * 2**20  # of the file and the older one together
FLUSH_EVENTS = 1024  # about 100 us of writing

LOOP, DEVICE, SENDS = 1, 2, 10  # tracks; overlapping sends use further ones
_TRACKS = {LOOP: "step loop", DEVICE: "device", SENDS: "HTTP sends"}
_TAIL = b"\n]\n"


class _Span(NamedTuple):
    track: int
    name: str
    begin: float  # seconds of `perf_counter`
    end: float
    counts: dict[str, int]


class Timeline:
    """Collects spans and writes them to `path`. Older spans move to the same name with `.1` before its suffix.

    `span` may be called on any thread, the other methods on the loop's thread only. Raises `ConfigError` if the file
    cannot be written. If a later write fails, the log says so and the recording ends.
    """

    def __init__(self, path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> None:
        self._path = Path(path)
        self._older = self._path.with_name(f"{self._path.stem}.1{self._path.suffix}")
        self._most_bytes = most_bytes // 2
        self._spans: deque[_Span] = deque()
        self._sources: list[Callable[[], None]] = []
        self._closed = False
        self._start = self._marked = time.perf_counter()
        try:
            self._begin_file()
        except OSError as error:
            raise ConfigError(f"timeline: {self._path} cannot be written ({error.strerror}); name another") from error

    def mark(self, name: str, plan: StepPlan | None = None, **counts: int) -> None:
        """Record a span of the step loop, from the last mark until now."""
        now = time.perf_counter()
        self.span(LOOP, name, self._marked, now, counts if plan is None else plan_counts(plan) | counts)
        self._marked = now
        if len(self._spans) >= FLUSH_EVENTS:
            self.flush()

    def span(self, track: int, name: str, begin: float, end: float, counts: dict[str, int]) -> None:
        """Record a span from `begin` to `end`, in seconds of `perf_counter`. Spans of one track must not overlap."""
        if not self._closed:
            self._spans.append(_Span(track, name, begin, end, counts))

    def at_close(self, source: Callable[[], None]) -> None:
        """Call `source` when the timeline is closed, so that it records its last spans."""
        self._sources.append(source)

    def flush(self) -> None:
        """Write the collected spans to the file."""
        lines = []
        while self._spans:  # a worker may be adding to it
            lines.append(_encoded(self._spans.popleft(), self._start))
        if not lines or self._closed:
            return
        try:
            with self._path.open("r+b") as file:
                file.seek(-len(_TAIL), os.SEEK_END)
                file.write(b"".join(b",\n" + line for line in lines) + _TAIL)
                size = file.tell()
            if size > self._most_bytes:
                self._path.replace(self._older)
                self._begin_file()
        except OSError as error:  # a full disk must not end the engine
            log.error("the timeline cannot be written and ends here: %s", error)
            self._closed = True

    def close(self) -> None:
        """Write the remaining spans and close the file. Later spans are dropped."""
        for source in self._sources:
            source()
        self.flush()
        self._closed = True

    def _begin_file(self) -> None:
        head: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "aengine"}}]
        head += [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in _TRACKS.items()
        ]
        self._path.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(entry) for entry in head) + _TAIL)


def plan_counts(plan: StepPlan) -> dict[str, int]:
    """Return the counts of a step's plan, for its span."""
    return {
        "step": plan.step,
        "decode": len(plan.decode),
        "drafts": plan.decode_tokens - len(plan.decode),
        "prompt_tokens": plan.num_tokens - plan.decode_tokens,
        "new": len(plan.new_rows),
    }


def ignore_mark(name: str, plan: StepPlan | None = None, **counts: int) -> None:
    """Do nothing. Takes the place of `Timeline.mark` if there is no timeline."""


def _encoded(span: _Span, start: float) -> bytes:
    return msgspec.json.encode(
        {
            "name": span.name,
            "ph": "X",
            "pid": 1,
            "tid": span.track,
            "ts": round(1e6 * (span.begin - start), 3),
            "dur": round(1e6 * (span.end - span.begin), 3),
            "args": span.counts,
        }
    )
