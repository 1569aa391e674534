"""All figures of a GPU are measured by one command, which keeps to its time and compares two checkouts."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import pytest

from bench import record
from bench.record import ENTRIES, Entry
from bench.results import ROOT

WRITES = """
import sys, msgspec
from bench.results import Origin, Result
origin = Origin("machine", {}, "", "", "")
result = Result(bench="b", case={"shape": "s"}, figures={"tok/s": FIGURE}, origin=origin)
open(sys.argv[sys.argv.index("--out") + 1], "ab").write(msgspec.json.encode(result) + b"\\n")
"""


def entry(name: str, program: str, seconds: float = 20) -> Entry:
    return Entry("table", name, seconds, ["-c", program])


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a checkout with other figures."""
    folder = tmp_path / "older"
    folder.mkdir()
    (folder / "bench").symlink_to(ROOT / "bench")
    return folder


def test_figures_of_two_checkouts_are_compared(
    older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = WRITES.replace("FIGURE", "100.0 if '/older' in __import__('os').getcwd() else 110.0")
    monkeypatch.setattr(record, "ENTRIES", (entry("one", program),))
    assert record.main(["--out", str(tmp_path / "out"), "--against", str(older)]) == 0
    assert "| one s tok/s | 100 | 110 | 1.100 |" in capsys.readouterr().out


def test_what_does_not_fit_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        entry("long", "", 100),
        entry("broken", "raise SystemExit(3)"),
        entry("hanging", "import signal; signal.pause()", 0.2),
        entry("sound", ""),
    )
    monkeypatch.setattr(record, "ENTRIES", entries)
    assert record.main(["--out", str(tmp_path), "--minutes", "1"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-3:] == [
        "long: left out, it takes 100 s",
        f"broken in {ROOT.name}: exit status 3, broken.0.log says why",
        f"hanging in {ROOT.name}: ended after 0 s",
    ]
    assert any(line.startswith(f"sound in {ROOT.name}: done") for line in told)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in ENTRIES])
def test_a_benchmark_knows_its_options(one: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    script, *words = one.command
    read = argparse.ArgumentParser.parse_args

    def only_read(self: argparse.ArgumentParser) -> None:
        read(self)  # ends the process if a word is no option or no choice
        raise InterruptedError

    monkeypatch.setattr(sys, "argv", [script, *words, "--out", os.devnull])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_read)
    with pytest.raises(InterruptedError):
        importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()


def test_names_are_of_one_benchmark_each() -> None:
    names = [one.name for one in ENTRIES]
    assert len(names) == len(set(names))
