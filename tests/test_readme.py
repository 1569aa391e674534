"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.http.demo_host import hosted_demo

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_python_example_runs() -> None:
    (example,) = (block for block in PYTHON if "with aengine.Engine()" in block)
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    text, ending, answer, rate = run.stdout.splitlines()
    assert text.startswith(" Paris")
    assert ending.split()[0] in ("stop", "length")
    assert "42" in answer
    assert 0 <= float(rate) <= 1


@pytest.mark.anyio
@pytest.mark.parametrize("word", ["tools", "aengine.Client"])
async def test_the_examples_that_ask_a_server_say_what_they_promise(word: str) -> None:
    (example,) = (block for block in PYTHON if word in block)
    async with hosted_demo() as url:
        code = example.replace("http://localhost:8000", url)
        run = await anyio.run_process([sys.executable, "-c", code], check=False)
    assert run.returncode == 0, run.stderr.decode()
    promised = re.findall(r"\)  # (.*)", example)
    assert run.stdout.decode().splitlines() == promised


def test_every_knob_can_be_found() -> None:
    assert "aengine/config.py" in README


def test_every_dependency_has_its_line() -> None:
    declared = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    block = declared.split("dependencies = [")[1].split("]")[0]
    for name in re.findall(r'"([a-z-]+)', block):
        assert f"| {name}" in README, f"{name} has no line in the README's table"
