"""Behaviour that all commands share: help, wrong arguments, exit statuses."""

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


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr()
    assert main(["--help"]) == 0
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "examples:" in told
    assert f"aengine {command}" in told
    assert len(told.splitlines()) <= 24
    assert [line for line in told.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_all_of_the_help_has_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help-all"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: aengine {command} [")
    assert len(told.partition("\n\n")[0].splitlines()) == 1
    told = " ".join(told.split())
    assert "(default: 256; AENGINE_MAX_NUM_SEQS)" in told
    assert "(default: 32 MiB; AENGINE_MAX_BODY_BYTES)" in told or command != "serve"
    assert "--enable-lora" not in told  # flags of other engines are accepted but not shown


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
        (["serve", "--quite-another-thing"], "unknown flag --quite-another-thing; see aengine serve --help-all"),
        (["serve", "--block-size", "8"], "unknown flag --block-size; did you mean --page-size?"),
        (["serve", "--lora-modules=a=b"], "unknown flag --lora-modules; did you mean --lora?"),
        (["serve", "--tool-call-parser", "hermes"], "unknown flag --tool-call-parser; did you mean --tool-format?"),
        (["serve", "--enforce-eager"], "unknown flag --enforce-eager; did you mean --no-cuda-graphs?"),
        (["serve", "--disable-prefix-cache"], "unknown flag --disable-prefix-cache; did you mean --no-prefix-cache?"),
        (["serve", "--disable-page"], "unknown flag --disable-page; did you mean --no-page?"),
        (["serve", "--enable-pages"], "unknown flag --enable-pages; see aengine serve --help-all"),
        (["serve", "--no-page-size", "1"], "unknown flag --no-page-size; see aengine serve --help-all"),
        (
            ["serve", "--no-enable-chunked-prefill"],
            "unknown flag --no-enable-chunked-prefill; prompts are always read in chunks; leave it out",
        ),
        (
            ["serve", "m", "--foo", "1", "--max-num-batched-tokens", "16", "-pp", "2", "--foo", "2"],
            "unknown flags --foo, --max-num-batched-tokens (did you mean --max-step-tokens?), -pp (layers are not "
            "spread over GPUs; use tensor_parallel_size); see aengine serve --help-all",
        ),
        (["generate", "-", "a/b"], "unknown argument 'a/b'; a model is named with --model a/b"),
        (["--versio"], "unknown flag --versio; did you mean --version?"),
        (["--port=1"], "flag --port has no command before it; write aengine serve|chat|generate --port"),
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
        (["help"], "unknown command 'help'; did you mean aengine --help?"),
        (["tests"], "unknown command 'tests'; there are serve, chat, generate"),  # a folder without a model
        (["Qwen/Qwen3-8B"], "unknown command 'Qwen/Qwen3-8B'; did you mean aengine serve Qwen/Qwen3-8B?"),
    ],
)
def test_a_wrong_command_suggests_the_right_one(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"aengine: {told}\n"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["generate", "Hello there"],
            "there is no file 'Hello there'; prompts come from a file or a pipe: "
            'echo "Hello there" | aengine generate --text',
        ),
        (
            ["generate", "Qwen/Qwen3-8B"],
            "'Qwen/Qwen3-8B' is no file of prompts; a model is named with --model Qwen/Qwen3-8B",
        ),
        (
            ["chat", "What is 2+2?"],
            "'What is 2+2?' is in the place of the model's name; to send it: echo \"What is 2+2?\" | aengine chat",
        ),
        (
            ["chat", "Hi, $USER"],
            "'Hi, $USER' is in the place of the model's name; to send it: echo 'Hi, $USER' | aengine chat",
        ),
        (
            ["chat", "owner/name", "--url", "http://127.0.0.1:1", "--device", "cpu"],
            "--device, the model 'owner/name' cannot be set for a server: leave it out, or leave out --url",
        ),
        (["serve", "a", "--model", "b"], "two models are named, 'a' and 'b'; leave one out"),
        (["serve", "--model", "a", "b"], "two models are named, 'a' and 'b'; leave one out"),
        (["serve", "--page=maybe"], "--page is a switch: it takes true or false, not 'maybe'"),
        (["chat", "--temperature", "9"], "temperature must be between 0 and 2, got 9.0"),
        (
            ["serve", "--served-model-name", "qwen", "Qwen/Qwen3-8B"],
            "--served-model-name takes every word after it, also 'Qwen/Qwen3-8B', and no model is given: write the "
            "model first, or --model",
        ),
    ],
)
def test_a_misplaced_argument_gets_a_suggestion(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"aengine: {told}\n"


def test_a_variable_that_sets_nothing_ends_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_MAX_NUM_SEQ", "4")
    for command in ("serve", "chat"):
        assert main([command]) == 2
        told = "unknown variable AENGINE_MAX_NUM_SEQ (did you mean AENGINE_MAX_NUM_SEQS?); correct or unset it"
        assert capsys.readouterr().err == f"aengine: {told}\n"


@pytest.mark.parametrize("args", [["serve", "--port"]])
def test_wrong_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "usage: aengine" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error_to_tell() -> None:
    """The pipe's other end is closed before anything is written."""
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
        assert process.wait(30) in (0, 1)  # argparse ignores the error
