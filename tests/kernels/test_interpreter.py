"""Without a GPU, the Triton kernels run with tiny shapes in the interpreter, in processes of their own.

About a dozen cases of each test file run, at least one of each test (tests/kernels/interpreted.py). Every function of
`triton.jit` in the package must run, so new and renamed ones count as well.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aengine import kernels

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# Parts that run in parallel with the rest: folders of tests, and the packages whose kernels they launch.
# `parts` has functions that kernels of products call; no kernel of the rest calls all of them.
ROOMS = {"experts": (["experts"], ["experts"]), "products": (["linear", "lora"], ["linear", "lora", "parts"])}
BESIDE = (
    "tests/sampling/test_fused.py",
    "tests/sampling/test_shared_tokens.py",
    "tests/attention/test_flash4.py",
    "tests/attention/test_local_chunks.py",
    "tests/attention/test_mutual.py",
)


def rooms_and_packages(part: str) -> tuple[list[str], list[str]]:
    """Return the paths for pytest, and the packages whose kernels must all run."""
    if part in ROOMS:
        rooms, packages = ROOMS[part]
        return [f"tests/kernels/{room}" for room in rooms], packages
    ignored = [f"--ignore=tests/kernels/{room}" for rooms, _ in ROOMS.values() for room in rooms]
    taken = {package for _, packages in ROOMS.values() for package in packages}
    found = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    return ["tests/kernels", *BESIDE, *ignored], [name for name in found if name not in taken]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU")
@pytest.mark.parametrize("part", [*ROOMS, "rest"])
def test_the_kernels_are_right_in_the_interpreter(part: str) -> None:
    where, packages = rooms_and_packages(part)
    chosen = ("-m", "gpu", "-k", "tiny", "-p", "tests.kernels.interpreted")
    command = [sys.executable, "-m", "pytest", "-q", *chosen, *where]
    must_run = ",".join(f"aengine.kernels.{package}." for package in packages)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "AENGINE_TEST_KERNELS": must_run}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
