"""Measure the figures of README.md on a GPU, table by table, within a number of minutes.

    python -m bench.record --out figures --minutes 9 [--only mixtures speculation] [--against OLDER_CHECKOUT]

Each benchmark is a process of its own. Its JSON lines and its log go to files in the folder `--out`. A benchmark that
does not fit into the rest of the time is left out, and the last lines say which. With `--against` every benchmark runs
in both checkouts in turns on the same board, and a table has the ratios of their figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.results import ROOT, Result

LATE = 1.5  # a benchmark is ended after this many times its seconds


@dataclass(frozen=True)
class Entry:
    """A benchmark. seconds: how long it takes on an H200 with warm kernel caches."""

    table: str
    name: str
    seconds: float
    command: Sequence[str]  # after `python`, without --out


def _gpu(table: str, shape: str, seconds: float, *only: str, quantization: str = "", knob: str = "") -> Entry:
    command = ["bench/gpu.py", "--shape", shape, "--only", *only]
    command += ["--quantization", quantization] if quantization else []
    command += ["--knob", knob] if knob else []
    return Entry(table, "-".join(filter(None, (shape, quantization, knob.replace("=", "-")))), seconds, command)


def _drafts(name: str, seconds: float, options: str) -> Entry:
    return Entry("speculation", name, seconds, ["bench/speculation.py", *options.split()])


_THREE = ("decode1", "decode256", "prefill")
ENTRIES = (
    _gpu("dense", "8b", 90, *_THREE, "nano", "prefix", "long32k"),
    _gpu("dense", "0.6b", 60, *_THREE, "nano", "prefix", "long32k"),
    _gpu("dense", "gemma3-12b", 75, *_THREE),
    _gpu("quantised", "8b", 75, *_THREE, "nano", quantization="fp8"),
    _gpu("quantised", "8b", 60, "decode256", quantization="fp8", knob="kv_cache_dtype=fp8"),
    _gpu("quantised", "8b", 85, *_THREE, "8x1k", "nano", quantization="awq"),
    _gpu("quantised", "8b", 60, *_THREE, "8x1k", quantization="nvfp4"),
    _gpu("mixtures", "gpt-oss-20b", 80, *_THREE, "64x1k", "1k1k"),
    _gpu("mixtures", "gpt-oss-20b", 70, "decode256", "1k1k", knob="kv_cache_dtype=fp8"),
    _gpu("mixtures", "gpt-oss-120b", 200, "decode1", "8x1k", "64x1k", "prefill", "1k1k", "8k1k"),
    _gpu("mixtures", "moe30b", 75, *_THREE, "8x1k", "nano"),
    _gpu("mixtures", "moe30b", 60, *_THREE, quantization="fp8"),
    _gpu("recurrent", "qwen3.5-9b", 75, *_THREE),
    _gpu("recurrent", "qwen3.5-35b-a3b", 90, *_THREE, "8x1k", "64x1k"),
    _gpu("recurrent", "qwen3.5-35b-a3b", 75, *_THREE, quantization="fp8"),
    _gpu("recurrent", "qwen3.5-35b-a3b", 85, *_THREE, "8x1k", quantization="awq"),
    _gpu("recurrent", "qwen3.5-35b-a3b", 85, *_THREE, "8x1k", quantization="nvfp4"),
    _drafts("eagle3-8b", 220, "--proposer eagle3 --streams 1 8 16 64 256 --rejected --prompts"),
    _drafts("mtp-9b", 174, "--shape qwen3.5-9b --proposer mtp --drafts 3 --streams 1 64 256 --rejected"),
    _drafts("eagle3-8b-fp8", 60, "--quantization fp8 --proposer eagle3 --streams 1 8"),
    _drafts("mtp-35b", 90, "--shape qwen3.5-35b-a3b --proposer mtp --drafts 3 --streams 1 16 --temperature 1"),
    _drafts("eagle3-120b", 300, "--shape gpt-oss-120b --proposer eagle3 --streams 1 8 64 --temperature 1"),
    _drafts("ngram-8b", 40, "--streams 1"),
    Entry("images", "images", 90, ["bench/images.py"]),
    Entry("start-up", "start-up", 80, ["bench/startup.py"]),
)
TABLES = tuple(dict.fromkeys(entry.table for entry in ENTRIES))


def record(entries: Sequence[Entry], out: Path, minutes: float, checkouts: Sequence[Path]) -> list[str]:
    """Run benchmarks, each in all checkouts. Return a line for each that failed or was left out."""
    out.mkdir(parents=True, exist_ok=True)
    end, troubles = time.monotonic() + 60 * minutes, list[str]()
    for entry in entries:
        if time.monotonic() + entry.seconds * len(checkouts) > end:
            troubles.append(f"{entry.name}: left out, it takes {entry.seconds * len(checkouts):.0f} s")
            continue
        for nth, checkout in enumerate(checkouts):
            began = time.monotonic()
            trouble = _run(entry, checkout, out / f"{entry.name}.{nth}.jsonl", out / f"{entry.name}.{nth}.log")
            print(f"{entry.name} in {checkout.name}: {trouble or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
            troubles += [f"{entry.name} in {checkout.name}: {trouble}"] if trouble else []
    return troubles


def _run(entry: Entry, checkout: Path, out: Path, log: Path) -> str:
    """Run one benchmark. Return what went wrong, or an empty text."""
    out.unlink(missing_ok=True)
    command = [sys.executable, *entry.command, "--out", str(out.resolve())]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    with log.open("w") as told:
        try:
            code = subprocess.run(
                command,
                cwd=checkout,
                env=environment,
                stdout=told,
                stderr=told,
                timeout=LATE * entry.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {LATE * entry.seconds:.0f} s"
    return "" if code == 0 else f"exit status {code}, {log.name} says why"


def ratios(out: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a row of a table for each figure that both checkouts measured."""
    for entry in entries:
        first, second = (_figures(out / f"{entry.name}.{nth}.jsonl") for nth in range(2))
        for key, value in first.items():
            if (new := second.get(key)) is not None and value:
                yield f"| {entry.name} {key} | {value:,.4g} | {new:,.4g} | {new / value:.3f} |"


def _figures(path: Path) -> dict[str, float]:
    found = dict[str, float]()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        result = msgspec.json.decode(line, type=Result)
        case = " ".join(str(value) for value in result.case.values())
        found |= {f"{case} {name}": value for name, value in result.figures.items() if value is not None}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=60.0)
    names = [entry.name for entry in ENTRIES]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*TABLES, *names],
        metavar="NAME",
        help=f"{', '.join(TABLES)}, or benchmarks: {', '.join(names)}",
    )
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    options = parser.parse_args(arguments)
    entries = [e for e in ENTRIES if not options.only or e.table in options.only or e.name in options.only]
    checkouts = [options.against, ROOT] if options.against else [ROOT]
    troubles = record(entries, options.out, options.minutes, checkouts)
    if options.against:
        print("| figure | before | now | ratio |\n|---|---|---|---|", *ratios(options.out, entries), sep="\n")
    for trouble in troubles:
        print(trouble)
    return bool(troubles)


if __name__ == "__main__":
    sys.exit(main())
