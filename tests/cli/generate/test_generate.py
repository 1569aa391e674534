"""`aengine generate`, in this process and against a server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import termios
from pathlib import Path

import anyio
import pytest

from tests.cli.running import AENGINE, environment, run
from tests.http.demo_server import demo_server

LINES = """\
"The capital of France is"
{"prompt": "The capital of Italy is", "max_tokens": 3, "id": "it"}

not json
{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
"""
FLAGS = ["--temperature", "0", "--max-tokens", "15"]


def check(status: int, out: str, err: str) -> None:
    france, italy, bad, chat = (json.loads(line) for line in out.splitlines())
    assert [result["line"] for result in (france, italy, bad, chat)] == [1, 2, 4, 5]
    assert france["text"].startswith(" Paris")
    assert (italy["id"], italy["finish_reason"], italy["usage"]["completion_tokens"]) == ("it", "length", 3)
    assert "JSON" in bad["error"]["message"]
    assert "42" in chat["text"]
    assert status == 1
    assert err == "aengine: 1 line could not be answered\n"


@pytest.mark.slow
def test_from_a_pipe_in_this_process() -> None:
    done = run("generate", *FLAGS, given=LINES)
    check(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.anyio
async def test_from_file_to_file_through_a_server(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINES)
    with demo_server() as url:
        command = [*AENGINE, "generate", str(source), "--output", str(target), "--url", url, *FLAGS]
        env = {name: value for name, value in environment().items() if not name.startswith("AENGINE_")}
        done = await anyio.run_process(command, check=False, env=env)
    assert done.stdout == b""
    check(done.returncode, target.read_text(), done.stderr.decode())


@pytest.mark.slow
def test_plain_text_gets_a_hint_to_its_flag() -> None:
    done = run("generate", given="The capital of France is\n")
    assert done.returncode == 1
    assert "--text" in json.loads(done.stdout)["error"]["message"]
    done = run("generate", *FLAGS, "--text", given="The capital of France is\n")
    assert json.loads(done.stdout)["text"].startswith(" Paris")
    assert done.returncode == 0


@pytest.mark.slow
def test_nothing_gives_nothing() -> None:
    done = run("generate", given="\n\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n' * 5)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [*AENGINE, "generate", str(source), "--output", os.devnull, "--max-tokens", "2"]
    with subprocess.Popen(command, stderr=theirs, stdin=subprocess.DEVNULL, env=environment()) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # Linux raises it when the terminal's other side is closed
            pass
        assert process.wait(30) == 0
    os.close(ours)
    assert b"5/5" in shown
    assert b"10 tokens" in shown


@pytest.mark.slow
def test_a_reader_that_leaves_early() -> None:
    command = [*AENGINE, "generate", "--max-tokens", "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b'"a"\n' * 10)
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1


@pytest.mark.slow
def test_a_batch_file_of_openais() -> None:
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    asked = {"custom_id": "sum", "method": "POST", "url": "/v1/chat/completions", "body": body}
    done = run(
        "generate", given=f'{json.dumps(asked)}\n{{"prompt": "x", "max_tokens": 2}}\n', AENGINE_API_KEYS="secret"
    )
    answered, plain = (json.loads(line) for line in done.stdout.splitlines())
    assert answered["custom_id"] == "sum"
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == "17 + 25 = 42."
    assert plain["line"] == 2
    assert (done.returncode, done.stderr) == (0, "")
    done = run("generate", "--temperature", "1", given=json.dumps(asked))
    assert (done.returncode, done.stdout) == (2, "")
    assert "has all parameters in its body" in done.stderr


@pytest.mark.parametrize(
    ("args", "status", "told"),
    [
        (["--temperature", "warm"], 2, "temperature"),
        (["--max-queue", "0"], 2, "max_queue is 0"),
        (["--url", "http://127.0.0.1:9"], 1, "cannot be reached"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["/nonexistent/in"], 2, "there is no file '/nonexistent/in'"),
                (["--output", "/nonexistent/out"], 1, "/nonexistent/out: No such file or directory"),
                (["--concurrency", "0"], 2, "--concurrency"),
                (["--url", "nowhere"], 1, "address"),
                (["--url", "http://127.0.0.1:9", "--page-size", "16"], 2, "--page-size cannot be set for a server"),
                (["--model", "/nonexistent/model"], 1, "/nonexistent/model"),
            )
        ),
    ],
)
def test_errors_are_one_sentence(args: list[str], status: int, told: str) -> None:
    done = run("generate", *args)
    assert done.returncode == status
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
