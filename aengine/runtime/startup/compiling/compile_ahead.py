"""Kernels are compiled by processes beside the start-up, while it imports packages and reads weights.

A start-up launches some 60 variants of Triton kernels and 4 of flash-attn-4, of 1 to 5 s each. Threads of this process
would wait for each other: a tenth of Triton's work and nearly all of flash-attn-4's holds the interpreter. So for a few
seconds there are processes, which end before the first request is taken. They fill the caches on disk that the
packages keep anyway; whatever they miss, the start-up compiles itself as it comes to it.

A file in those caches says that a start-up of the same configuration has gone through: then nothing is done. It also
tells how much memory that one needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from triton import knobs

from aengine.attention.flash4 import HEADS
from aengine.attention.flash_backend import HALVES, flash4_cache, flash4_runs_on, keep_compiled
from aengine.model.spec import AttentionSpec
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.sizing.needs import read_needs, write_needs

log = logging.getLogger("aengine")

CORES_EACH = 3  # that a process of threads keeps busy: beyond, they wait for its interpreter
MOST_PROCESSES = 6  # each imports torch and runs through all steps before it compiles its share
FLASH_PROCESSES = 4  # flash-attn-4 needs as many variants, and twice as many of a model with windows
LONGEST = 300.0  # seconds; then the start-up goes on by itself
# Without the collector, which takes a third of the time until compiling begins.
_PROGRAM = "import gc; gc.disable(); from aengine.runtime.startup.compiling.rehearsal import main; main()"
_PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


class CompileAhead:
    """The processes, and the files that say that none is needed."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], marks: list[Path]) -> None:
        self._processes = processes
        self._marks = marks

    def needs(self, devices: Sequence[torch.device]) -> list[int] | None:
        """Bytes that each device needs beside the weights, as a start-up that went through has found; None: unknown."""
        return read_needs(self._marks[0], devices) if self._marks else None

    def wait(self) -> None:
        """Until all have ended."""
        until = time.monotonic() + LONGEST
        for process in self._processes:
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = -1
            if status:
                log.debug("a process that compiles kernels ended with %d", status)

    def keep(self, devices: Sequence[torch.device] = (), needs: Sequence[int] | None = None) -> None:
        """Say that a start-up has gone through: all that it needed is in the caches. needs: what it has measured."""
        for mark in self._marks:
            try:
                mark.touch()
            except OSError as error:
                log.debug("%s: %s", mark, error)
        if needs is not None and self._marks:
            write_needs(self._marks[0], devices, needs)

    def forget(self) -> None:
        """The next start-up is to compile and to measure anew."""
        for mark in self._marks:
            with suppress(OSError):
                mark.unlink()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def compile_ahead(job: Job) -> Iterator[CompileAhead]:
    """Begin to compile what a start-up needs; nothing of it is left running behind the block."""
    keep_compiled()
    marks = _marks(job)
    known = bool(marks) and all(mark.exists() for mark in marks)
    ahead = CompileAhead([] if known else _begin(job), marks)
    try:
        yield ahead
    finally:
        ahead.stop()


def _begin(job: Job) -> list[subprocess.Popen[bytes]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(MOST_PROCESSES, cores // CORES_EACH))
    jobs = [
        msgspec.structs.replace(job, what="triton", index=index, count=count, threads=max(1, cores // count))
        for index in range(count)
    ]
    halves = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    flash = any(isinstance(one, AttentionSpec) and one.head_dim in HEADS for one in job.model.attending)
    if flash and job.dtype in halves and flash4_runs_on(job.capability):
        count = FLASH_PROCESSES if cores > CORES_EACH else 1
        jobs += [msgspec.structs.replace(job, what="flash-attn-4", index=index, count=count) for index in range(count)]
    if not sys.executable:  # an interpreter within another program
        return []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",  # a context of its own would take memory that is being measured
        "OMP_NUM_THREADS": "1",
    }
    return [_run(job, environment) for job in jobs]


def _run(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:  # a large model's job is more than a pipe holds, and who writes would wait
        file.write(msgspec.json.encode(job))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # -P: nothing from the working directory
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env=environment,
        )


def _marks(job: Job) -> list[Path]:
    """A file in each cache, named after everything that the variants follow from."""
    config = msgspec.structs.replace(
        job.config, model=None, revision=None, lora={}, seed=0, timeline=None, progress=False
    )
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(job, config=config, room=0)))
    for name in _PACKAGES:
        try:
            digest.update(importlib.metadata.version(name).encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(b"-")
    package = Path(str(importlib.resources.files("aengine")))
    for room in ("attention", "cache", "kernels", "model", "runtime", "sampling"):
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    folders = [Path(knobs.cache.dir), flash4_cache()]
    return [folder / f"aengine-{digest.hexdigest()[:32]}" for folder in folders if folder is not None]
