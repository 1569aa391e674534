"""Failures are in the file as soon as they are reported, also if the run is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import os
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("torn down badly")

@pytest.mark.parametrize("number", range(25))
def test_fine(number): pass

def test_wrong(): assert 3 == 4, "a wrong sum"

def test_left(broken): print("said before")

def test_skipped(): pytest.skip("not here")

def test_last():
    if "CUT_OFF" in os.environ:
        os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), 9)
"""


def run(folder: Path, *options: str, **environment: str) -> str:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    log = folder / "failures.txt"
    command = [sys.executable, "-m", "pytest", "-p", "tests.failures", "-p", "no:cacheprovider", *options, "."]
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TEST_FAILURES": str(log), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=known | environment, capture_output=True, check=False, timeout=120)
    return log.read_text()


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_each_failure_has_its_name_its_phase_and_its_traceback(options: list[str], tmp_path: Path) -> None:
    text = run(tmp_path, *options)
    assert text.count("==== FAILED") == 2
    assert "==== FAILED test_some.py::test_wrong (call)\n" in text
    assert "def test_wrong(): assert 3 == 4" in text
    assert "a wrong sum" in text
    assert "==== FAILED test_some.py::test_left (teardown)\n" in text
    assert "torn down badly" in text
    assert "said before" in text
    assert "==== 20 tests, 20 passed, 0 failed, 0 skipped, 0 xfailed after" in text
    assert "==== 29 tests, 27 passed, 2 failed, 1 skipped, 0 xfailed after" in text


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_run_that_is_cut_off_loses_no_failure(options: list[str], tmp_path: Path) -> None:
    text = run(tmp_path, *options, CUT_OFF="1")
    assert "==== FAILED test_some.py::test_wrong (call)\n" in text
    assert "torn down badly" in text
    assert "==== 20 tests, 20 passed" in text
    assert "29 tests" not in text


def test_a_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    text = run(tmp_path)
    assert "==== FAILED test_broken.py (collect)" in text
    assert "no_such_module" in text
