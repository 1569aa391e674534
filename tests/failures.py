"""A pytest plugin that writes each failure to a file at once, so that a run that is cut off loses none.

`TEST_FAILURES=failures.txt pytest -p tests.failures ...` appends to the file. With xdist only the controller
writes, when a worker has reported.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

FILE = "TEST_FAILURES"  # not AENGINE_..., because the engine refuses unknown variables of that kind
EVERY = 20  # tests, after which counts are written


class FailureLog:
    """Appends failures and counts to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._failed: set[str] = set()  # tests with a failure in any phase
        self._begin = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            self._write_failure(report)
        elif report.skipped and report.nodeid not in self._failed:
            self._counts["xfailed" if hasattr(report, "wasxfail") else "skipped"] += 1
        elif report.when == "call" and report.passed:
            self._counts["passed"] += 1
        if report.when == "teardown":
            self._counts["tests"] += 1
            if self._counts["tests"] % EVERY == 0:
                self._write_counts()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            self._write_failure(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._write_counts()

    def _write_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        parts = [f"==== FAILED {report.nodeid} ({report.when})", report.longreprtext]
        parts += [f"-- {name} --\n{text}" for name, text in report.sections]
        self._append("\n".join(parts))

    def _write_counts(self) -> None:
        self._counts["failed"] = len(self._failed)
        names = ("tests", "passed", "failed", "skipped", "xfailed")
        listed = ", ".join(f"{self._counts[name]} {name}" for name in names)
        self._append(f"==== {listed} after {time.monotonic() - self._begin:.0f} s")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            print(text, file=file)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of xdist
        return
    if FILE not in os.environ:
        raise pytest.UsageError(f"tests.failures needs the name of a file in {FILE}")
    config.pluginmanager.register(FailureLog(Path(os.environ[FILE]).absolute()))
