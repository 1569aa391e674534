"""Runs the examples of the README and of the rooms' READMEs as they are printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aengine.config import ServerConfig
from aengine.http.anthropic.bodies import MessagesRequest
from aengine.http.native.generate import GenerateRequest
from aengine.http.openai.bodies import ChatRequest, CompletionRequest
from aengine.http.pooling.bodies import POOLED
from aengine.http.responses.bodies import ResponsesRequest
from aengine.http.routes import operations
from aengine.http.state import ServerState
from tests.cli.running import run, served
from tests.http.demo_server import demo_server

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "aengine").rglob("README.md")),
    ROOT / "aengine" / "http" / "CLIENTS.md",
    ROOT / "aengine" / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    ROOT / "bench" / "README.md",
]
README = "\n".join(path.read_text() for path in DOCUMENTS[:-1])
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.slow
def test_the_python_example_runs() -> None:
    (example,) = (block for block in PYTHON if "with aengine.Engine()" in block)
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    text, ending, answer, rate = run.stdout.splitlines()
    assert text.startswith(" Paris")
    assert ending.split()[0] in ("stop", "length")
    assert "42" in answer
    assert 0 <= float(rate) <= 1


@pytest.mark.slow
def test_the_example_without_asyncio_runs() -> None:
    (example,) = (block for block in PYTHON if "with aengine.LLM()" in block)
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == "17 + 25 = 42."


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with demo_server() as url:
        yield url.removeprefix("http://")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    return [block for block in blocks if block.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", commands(), ids=lambda command: command.split()[1] + command.split()[2])
def test_the_curl_examples_run(server: str, command: str) -> None:
    written = command.replace("curl ", "curl -sS --fail-with-body --noproxy '*' ", 1).replace("localhost:8000", server)
    run = subprocess.run(["bash", "-c", written], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    answers = [line.removeprefix("data: ") for line in run.stdout.splitlines() if line and line != "data: [DONE]"]
    assert answers
    assert not any(json.loads(answer).get("error") for answer in answers)


@pytest.mark.parametrize("library", ["openai", pytest.param("anthropic", marks=pytest.mark.slow)])
def test_the_client_example_runs(server: str, library: str) -> None:
    (example,) = (block for block in PYTHON if f"import {library}\n" in block)
    code = example.replace("localhost:8000", server)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_every_endpoint_and_parameter_has_its_line() -> None:
    for operation in operations(ServerState(ServerConfig())):
        assert f"{operation.template}`" in README, operation.template
    for struct in (CompletionRequest, ChatRequest, GenerateRequest, MessagesRequest, ResponsesRequest, *POOLED):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in README, name


@pytest.mark.parametrize("word", [pytest.param("weather = {", marks=pytest.mark.slow, id="tools"), "aengine.Client"])
def test_the_examples_that_ask_a_server_say_what_they_promise(server: str, word: str) -> None:
    (example,) = (block for block in PYTHON if word in block)
    code = example.replace("localhost:8000", server)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"\)  # (.*)", example)
    assert run.stdout.splitlines() == promised


def console(command: str) -> tuple[list[str], str]:
    """What the first such block of the console shows: the command's arguments, and what follows it."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.S)
    block = next(block for block in blocks if f"$ aengine {command}" in block)
    line, _, shown = block[block.index(f"$ aengine {command}") :].partition("\n")
    return shlex.split(line)[2:], shown


def without_figures(text: str) -> str:
    """Speeds, sizes and times are the machine's."""
    return re.sub(r"[\d.]+ (tokens/s|ms|s|pages|MiB|M )|\(AVX.*?\)|:\d+|1 to \d+ threads", "#", text)


@pytest.mark.slow
def test_the_server_on_the_command_line_says_what_it_says_here() -> None:
    arguments, shown = console("serve")
    assert arguments == ["serve", "--port", "8000"]
    with served() as server:
        server.send(signal.SIGINT)
        _, rest = server.end()
    said = "".join(server.told) + rest
    expected = shown.replace("^C", "").replace("pages of 16 tokens (1024 MiB)", "pages of 16 tokens (96 MiB)")
    assert without_figures(said).split() == without_figures(expected).split()


@pytest.mark.slow
def test_the_shell_says_what_it_says_here() -> None:
    arguments, shown = console("chat")
    typed = "".join(f"{line}\n" for line in re.findall(r"^> (.*)", shown, re.M))
    answers = "".join(line for line in shown.splitlines(keepends=True)[1:] if not line.startswith("> "))
    done = run(*arguments, given=typed)
    assert done.returncode == 0
    assert without_figures(done.stdout.rstrip()) == without_figures(answers.rstrip())


@pytest.mark.slow
def test_the_batch_gives_what_it_gives_here(tmp_path: Path) -> None:
    arguments, shown = console("generate")
    prompts = README.split("$ cat prompts.jsonl\n")[1].split("$ ")[0]
    (tmp_path / "prompts.jsonl").write_text(prompts)
    done = run(*(str(tmp_path / word) if word == "prompts.jsonl" else word for word in arguments))
    assert done.stdout + done.stderr == shown


def test_the_tests_are_run_as_it_stands_here() -> None:
    """Return all test commands but those for a GPU. The quick ones come first, as a newcomer runs them."""
    shown = [line for line in re.findall(r"^pytest .*", README, re.M) if "-m 'gpu" not in line]
    assert re.findall(r"^pytest .*", (ROOT / ".ci" / "run").read_text(), re.M) == shown
    assert shown[0] == "pytest -n 2"


def test_every_knob_can_be_found() -> None:
    assert "aengine/config/" in README


def test_every_dependency_has_its_line() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    block = declared.split("dependencies = [")[1].split("]")[0]
    for name in re.findall(r'"([a-z-]+)', block):
        assert f"| {name}" in README, f"{name} has no line in the README's table"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text()):
        headings = re.findall(r"^#+ (.*)", (path.parent / target if target else path).read_text(), re.M)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], anchor


def test_the_tour_has_about_as_many_lines_as_it_says() -> None:
    document = (ROOT / "aengine" / "README.md").read_text()
    tour = document.partition("## A tour")[2].partition("\n## ")[0]
    files = re.findall(r"^\| \[`([\w/]+\.py)`\]\(\1\) \| .+ \|$", tour, re.M)
    lines = sum(len((ROOT / "aengine" / file).read_text().splitlines()) for file in files)
    assert len(files) >= 12
    assert 2500 <= lines <= 3600
    assert f"about {round(lines, -2):,} lines" in tour
