"""What all commands have in common."""

from __future__ import annotations

import subprocess

import pytest

import aengine
from aengine.cli import main
from tests.cli.running import AENGINE, environment
from tests.one_in import one_in
from tests.test_imports import HEAVY, loaded_by

COMMANDS = ("serve", "chat", "generate")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"aengine {aengine.__version__}\n"


def test_help_names_the_commands_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in told
        assert f"\n  aengine {command}" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "examples:" in told
    assert f"aengine {command}" in told


@pytest.mark.parametrize("args", one_in(4, [["--help"], *([command, "--help"] for command in COMMANDS)]))
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    loaded = loaded_by(f"from aengine.cli import main; main({args!r})")
    assert loaded.isdisjoint({*HEAVY, "hypercorn", "starlette", "httpx2"})


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serve", "--prot", "9000"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--prot=9000"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--max_model_len", "9"], "unknown flag --max_model_len; did you mean --max-model-len?"),
        (["serve", "--no-pages"], "unknown flag --no-pages; did you mean --no-page?"),
        (["chat", "--temprature", "0"], "unknown flag --temprature; did you mean --temperature?"),
        (["generate", "--max-tokns", "5"], "unknown flag --max-tokns; did you mean --max-tokens?"),
        (["generate", "in.jsonl", "--max-tok", "5"], "unknown flag --max-tok; did you mean --max-tokens?"),
        (["serve", "--quite-another-thing"], "unknown flag --quite-another-thing; see aengine serve --help"),
        (["serve", "model", "and more"], "unknown argument 'and more'; see aengine serve --help"),
    ],
)
def test_a_wrong_flag_suggests_the_right_one(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"aengine: {told}\n"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?"),
        (["server", "--port", "9000"], "unknown command 'server'; did you mean serve?"),
        (["gen"], "unknown command 'gen'; did you mean generate?"),
        (["caht"], "unknown command 'caht'; did you mean chat?"),
        (["sing"], "unknown command 'sing'; there are serve, chat, generate"),
        (["Qwen/Qwen3-8B"], "unknown command 'Qwen/Qwen3-8B'; there are serve, chat, generate"),
    ],
)
def test_a_wrong_command_suggests_the_right_one(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"aengine: {told}\n"


@pytest.mark.parametrize("args", [[], ["--port"], ["serve", "--port"]])
def test_wrong_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "usage: aengine" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error_to_tell() -> None:
    """Nobody reads: the pipe's other end is closed before anything is written."""
    with subprocess.Popen(
        [*AENGINE, "serve", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) in (0, 1)  # argparse overlooks it
