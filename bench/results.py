"""One format for every benchmark's figures, and one way of reporting them: JSON lines, then a markdown table."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "flash-attn", "hypercorn", "llguidance")


class Origin(msgspec.Struct, frozen=True):
    """The machine, versions, command and date of figures, so that they can be reproduced."""

    machine: str
    versions: dict[str, str]
    command: str
    date: str  # UTC
    commit: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One case of one benchmark. A figure's name ends with its unit, if it has one."""

    bench: str
    case: dict[str, str | int | float]  # the settings
    figures: dict[str, float | None]  # the measurements; medians if there were several runs
    runs: dict[str, list[float]] = {}  # the values of each run, if there were several
    reference: dict[str, float | None] = {}  # what the figures are held against: targets, limits, peers
    detail: dict[str, Any] = {}  # further data that is in no table
    origin: Origin


@cache
def origin() -> Origin:
    """Of this process."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    script = Path(sys.argv[0])
    words = [str(script.resolve().relative_to(ROOT)) if script.resolve().is_relative_to(ROOT) else script.name]
    command = " ".join(["python", *words, *sys.argv[1:]])
    return Origin(_machine(), versions, command, time.strftime("%Y-%m-%d", time.gmtime()), _commit())


def _machine() -> str:
    names = [f"{os.cpu_count()} cores of {_processor()}"]
    if (tool := shutil.which("nvidia-smi")) is not None:  # works without importing torch
        command = [tool, "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[:1] + names
    return ", ".join(name for name in names if name)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return told.stdout.strip()


class Report:
    """Prints each reported result as a JSON line, and also writes it to `out`."""

    def __init__(self, bench: str, out: Path | None = None) -> None:
        self.bench = bench
        self.results: list[Result] = []
        self._out = out
        if out is not None:
            out.write_text("")

    def tell(
        self,
        case: Mapping[str, str | int | float],
        figures: Mapping[str, float | None],
        *,
        runs: Mapping[str, Sequence[float]] | None = None,
        reference: Mapping[str, float | None] | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> Result:
        """Add one result. Values are rounded to 5 digits."""
        result = Result(
            bench=self.bench,
            case=dict(case),
            figures={name: _rounded(value) for name, value in figures.items()},
            runs={name: [_rounded(value) for value in values] for name, values in (runs or {}).items()},
            reference=dict(reference or {}),
            detail=dict(detail or {}),
            origin=origin(),
        )
        self.results.append(result)
        line = msgspec.json.encode(result).decode()
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")
        return result

    def print_table(self, columns: Sequence[str] | None = None) -> None:
        """Return tables of the results, one for each set of columns, followed by their origin."""
        groups: dict[tuple[str, ...], list[Result]] = {}
        for result in self.results:
            groups.setdefault((*result.case, *result.figures, *result.reference), []).append(result)
        for group in groups.values():
            print(f"\n{table(group, columns)}")
        print(f"\n{source_line(origin())}", flush=True)


def _rounded(value: float | None) -> Any:
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")


def read_results(files: Iterable[Path]) -> list[Result]:
    """What `Report` wrote. Raises `msgspec.DecodeError` for a file of another kind."""
    decoder = msgspec.json.Decoder(Result)
    return [decoder.decode(line) for file in files for line in file.read_bytes().splitlines() if line]


def table(results: Sequence[Result], columns: Sequence[str] | None = None) -> str:
    """Return a Markdown table with one row for each result. columns: None means all that the results name."""
    rows = [{**result.case, **result.figures, **result.reference} for result in results]
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(worded(row.get(name)) for name in names)} |" for row in rows]
    return "\n".join(lines)


def worded(value: str | float | None) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def source_line(source: Origin) -> str:
    """Return the line under a table."""
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return f"`{source.command}`: {source.machine}; {versions}; {source.date}, commit {source.commit}."
