"""With several GPUs, each replica has its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def test_replicas_see_different_gpus() -> None:
    command = [sys.executable, "-m", "tests.ray_serve.devices_driver"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr[-2000:]
    (seen,) = [line.removeprefix("seen ") for line in told.stdout.splitlines() if line.startswith("seen ")]
    assert sorted(json.loads(seen)) == ["0", "1"]  # the output also has lines of Ray
