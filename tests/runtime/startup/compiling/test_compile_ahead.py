"""The processes that compile kernels during start-up: when they start, and that all have ended after it."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

from triton import knobs

import aengine
from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.runtime.startup.compiling import compile_ahead
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.sizing import needs

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
JOB = Job(
    config=EngineConfig(),
    model=ModelConfig.from_folder(resolve_model(None, None)),
    dtype="bfloat16",
    capability=(9, 0),
    launch=Launch(132, True, 227 * 1024),
    kv_bytes=2**33,
)


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("triton", "flash"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "flash"))
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: range(8), raising=False)


def run(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """From now on this is what the processes do."""
    monkeypatch.setattr(compile_ahead, "_PROGRAM", program)


def processes(job: Job, keep: bool = False) -> list[subprocess.Popen[bytes]]:
    """What a start-up began, after it."""
    with compile_ahead.compile_ahead(job) as ahead:
        ahead.wait()
        if keep:
            ahead.keep()
        return ahead._processes


def test_each_process_is_told_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, f"import os, sys; open(f'{tmp_path}/{{os.getpid()}}.json', 'wb').write(sys.stdin.buffer.read())")
    count = len(processes(JOB))
    jobs = [msgspec.json.decode(path.read_bytes(), type=Job) for path in tmp_path.glob("*.json")]
    assert len(jobs) == count
    for what in ("triton", "flash-attn-4"):
        shares = sorted(job.index for job in jobs if job.package == what)
        assert shares == list(range(len(shares)))
        assert {job.count for job in jobs if job.package == what} == {len(shares)}
    assert {job.model for job in jobs} == {JOB.model}


@pytest.mark.slow
def test_a_start_up_that_went_through_needs_none_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "pass")
    assert processes(JOB)
    assert processes(JOB, keep=True)  # the first did not go through
    assert processes(JOB) == []
    elsewhere = msgspec.structs.replace(JOB, config=EngineConfig(model="a/copy", seed=3), kv_bytes=2**34)
    assert processes(elsewhere) == []
    for other in (
        msgspec.structs.replace(JOB, config=EngineConfig(max_num_seqs=8)),
        msgspec.structs.replace(JOB, dtype="float16"),
        msgspec.structs.replace(JOB, capability=(10, 0)),
    ):
        assert processes(other)


def test_the_processes_program_is_there() -> None:
    found = re.search(r"from (\S+) import (\w+); \2\(\)$", compile_ahead._PROGRAM)
    assert found
    assert callable(getattr(importlib.import_module(found[1]), found[2]))


def test_what_is_known_is_known_of_these_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of every room that determines kernels or steps are part of the digest."""
    run(monkeypatch, "pass")
    package, read = Path(aengine.__file__).parent, set[str]()
    read_bytes = Path.read_bytes

    def recorded(path: Path) -> bytes:
        if path.is_relative_to(package):
            read.add(path.relative_to(package).parts[0])
        return read_bytes(path) + (b"# changed" if path.name in changed else b"")

    changed: tuple[str, ...] = ()
    monkeypatch.setattr(Path, "read_bytes", recorded)
    processes(JOB, keep=True)
    assert read == {"attention", "cache", "kernels", "model", "runtime", "sampling"}
    assert processes(JOB) == []
    changed = ("launch.py",)
    assert processes(JOB)


def test_processes_that_fail_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "raise SystemExit(3)")
    assert {process.returncode for process in processes(JOB)} == {3}


def test_nobody_waits_until_a_large_models_job_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "import time; time.sleep(20)")
    with compile_ahead.compile_ahead(msgspec.structs.replace(JOB, config=EngineConfig(model="m" * 2**17))) as ahead:
        assert all(process.poll() is None for process in ahead._processes)


def test_none_is_left_behind_a_start_up_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "import time; time.sleep(600)")
    begun: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with compile_ahead.compile_ahead(JOB) as ahead:
            begun.extend(ahead._processes)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert begun
    assert all(process.returncode is not None and process.returncode < 0 for process in begun)


def test_devices_without_flash_attention_4_compile_the_engines_own_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(monkeypatch, "pass")
    with_flash = len(processes(JOB))
    assert 0 < len(processes(msgspec.structs.replace(JOB, capability=(8, 0)))) < with_flash
    assert 0 < len(processes(msgspec.structs.replace(JOB, dtype="float32"))) < with_flash


def test_what_a_start_up_needed_is_there_for_the_next_on_such_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "pass")
    kinds = {GPU: "H200, 150 GB", OTHER: "H100, 85 GB"}
    monkeypatch.setattr(needs, "describe_devices", lambda devices: [kinds[device] for device in devices])

    def known(*devices: torch.device) -> list[int] | None:
        with compile_ahead.compile_ahead(JOB) as ahead:
            return ahead.needs(devices)

    assert known(GPU) is None
    with compile_ahead.compile_ahead(JOB) as ahead:
        ahead.keep([GPU], [2**31])
    assert known(GPU) == [2**31]
    assert known(OTHER) is None
    assert known(GPU, GPU) is None
    with compile_ahead.compile_ahead(JOB) as ahead:
        ahead.keep([GPU])  # nothing was measured, so the stored memory stays
    assert known(GPU) == [2**31]
    [mark] = (tmp_path / "triton").iterdir()
    for nonsense in (b"", b"{", b'{"devices": ["H200, 150 GB"], "nbytes": [-1]}', b"[" * 20_000):
        mark.write_bytes(nonsense)
        assert known(GPU) is None
    with compile_ahead.compile_ahead(JOB) as ahead:
        ahead.forget()
    assert processes(JOB)  # all is to be found anew
