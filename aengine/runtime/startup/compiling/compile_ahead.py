"""Compiles kernels in other processes while start-up imports packages and reads weights.

Start-up launches about 60 variants of Triton kernels and 4 of flash-attn-4. Compiling one takes 1 to 5 s. Threads
would wait for the GIL: a tenth of Triton's work and nearly all of flash-attn-4's work holds it. So processes compile
for a few seconds and end before the first request. They fill the disk caches of these packages. Start-up itself
compiles the kernels that the processes have missed.

After a successful start-up, a file in each cache marks its configuration. The next start-up with the same configuration
starts no processes. The file also holds the memory that the start-up needed.
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
from aengine.model.spec.attention import AttentionSpec
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.sizing.needs import read_needs, write_needs

log = logging.getLogger("aengine")

CORES_EACH = 3  # cores that one process can use; more threads would wait for its GIL
MOST_PROCESSES = 6  # each imports torch and rehearses all steps before it compiles its share
FLASH_PROCESSES = 4  # flash-attn-4 has four variants, and eight for a model with windows
LONGEST = 300.0  # seconds; then start-up continues without the processes
# The garbage collector would take a third of the time up to the first compilation.
_PROGRAM = "import gc; gc.disable(); from aengine.runtime.startup.compiling.rehearsal import main; main()"
_PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


class CompileAhead:
    """The compiling processes of a start-up, and its mark files. If all marks exist, no process is needed."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], marks: list[Path]) -> None:
        self._processes = processes
        self._marks = marks

    def needs(self, devices: Sequence[torch.device]) -> list[int] | None:
        """Return the bytes that each device needs besides weights, from an earlier start-up. None: not known."""
        return read_needs(self._marks[0], devices) if self._marks else None

    def wait(self) -> None:
        """Wait until all processes have ended."""
        until = time.monotonic() + LONGEST
        for process in self._processes:
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = -1
            if status:
                log.debug("a process that compiles kernels ended with %d", status)

    def keep(self, devices: Sequence[torch.device] = (), needs: Sequence[int] | None = None) -> None:
        """Write the marks after a successful start-up. needs: the bytes that each device needs, if measured."""
        for mark in self._marks:
            try:
                mark.touch()
            except OSError as error:
                log.debug("%s: %s", mark, error)
        if needs is not None and self._marks:
            write_needs(self._marks[0], devices, needs)

    def forget(self) -> None:
        """Delete the marks, so that the next start-up compiles and measures again."""
        for mark in self._marks:
            with suppress(OSError):
                mark.unlink()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def compile_ahead(job: Job) -> Iterator[CompileAhead]:
    """Start compiling the kernels of a start-up. All processes have ended after the block."""
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
        msgspec.structs.replace(job, package="triton", index=index, count=count, threads=max(1, cores // count))
        for index in range(count)
    ]
    halves = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    flash = any(isinstance(one, AttentionSpec) and one.head_dim in HEADS for one, _ in job.attending)
    if flash and job.dtype in halves and flash4_runs_on(job.capability):
        count = FLASH_PROCESSES if cores > CORES_EACH else 1
        jobs += [
            msgspec.structs.replace(job, package="flash-attn-4", index=index, count=count) for index in range(count)
        ]
    if not sys.executable:  # the interpreter is embedded in another program
        return []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",  # a context would take memory that is being measured
        "OMP_NUM_THREADS": "1",
    }
    return [_run(job, environment) for job in jobs]


def _run(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:  # a large model's job does not fit into a pipe, and writing would block
        file.write(msgspec.json.encode(job))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # -P: no imports from the working directory
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env=environment,
        )


def _marks(job: Job) -> list[Path]:
    """Return the path of the mark in each cache. Its name is a digest of everything that determines the kernels."""
    config = msgspec.structs.replace(
        job.config, model=None, revision=None, lora={}, seed=0, timeline=None, progress=False
    )
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(job, config=config, kv_bytes=0)))
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
