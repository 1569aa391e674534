"""The arguments of `aengine serve`, without serving: flags of other engines, a file of flags."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from aengine.cli import main
from aengine.cli.serve import server as server_module
from aengine.cli.serve.server import greeting
from aengine.config import EngineConfig, ListenConfig, ServerConfig


class Started(NamedTuple):
    engine: EngineConfig
    server: ServerConfig
    listen: ListenConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The arguments of each call of `serve`."""
    calls: list[Started] = []

    def serve(*configs: object) -> int:
        calls.append(Started(*configs))  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(server_module, "serve", serve)
    return calls


def test_flags_of_vllm_are_accepted(started: list[Started], capfd: pytest.CaptureFixture[str]) -> None:
    pasted = (
        "Qwen/Qwen3-8B-AWQ --api-key sk,1 -tp 2 --dtype half --kv-cache-dtype fp8_e4m3 --quantization awq "
        "--enable-auto-tool-choice --enable-prefix-caching --trust-remote-code --enable-lora --max-model-len 32K "
        "--chat-template t.jinja --served-model-name qwen gpt-4 --enable-sleep-mode --enable-chunked-prefill "
        '--disable-log-requests --disable-uvicorn-access-log --load-format safetensors --allowed-origins ["*"] '
        "--async-scheduling"
    )
    assert main(["serve", *pasted.split()]) == 0
    ((engine, server, _),) = started
    assert engine == EngineConfig(
        model="Qwen/Qwen3-8B-AWQ",
        tensor_parallel_size=2,
        dtype="float16",
        kv_cache_dtype="fp8",
        quantization="awq",
        max_model_len=2**15,
        chat_template="t.jinja",
        sleep_mode=True,
    )
    assert server.api_keys == ("sk,1",)
    assert server.served_model_name == ("qwen", "gpt-4")
    assert server.allowed_origins == ("*",)
    said = capfd.readouterr().err
    assert "trust-remote-code: code of a checkpoint is never run here" in said
    assert "add --lora NAME=FOLDER" in said
    assert said.endswith("aengine: starting; the model is Qwen/Qwen3-8B-AWQ\n")


def test_the_opposite_is_taken_as_the_opposite(started: list[Started]) -> None:
    assert main(["serve", "--no-enable-prefix-caching", "--no-async-scheduling"]) == 0
    assert started[0].engine == EngineConfig(prefix_cache=False, lookahead=False)


@pytest.mark.parametrize(
    ("flags", "engine", "page"),
    [
        ("--prefix-cache=false --page=1", EngineConfig(prefix_cache=False), True),
        ("--no-prefix-cache=true --no-page=true", EngineConfig(prefix_cache=False), False),
        ("--no-prefix-cache=false --page=FALSE", EngineConfig(), False),
        ("--enable-lora=false --enable-chunked-prefill=true", EngineConfig(), True),
        ("--enable-prefix-caching=false", EngineConfig(prefix_cache=False), True),
    ],
)
def test_a_switch_may_have_a_value(
    flags: str, engine: EngineConfig, page: bool, started: list[Started], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags.split()]) == 0
    assert (started[0].engine, started[0].server.page) == (engine, page)
    assert "enable-lora" not in capfd.readouterr().err


FILE = """\
model: owner/name
port: 9000
tensor-parallel-size: 2
max_model_len: 32k
served-model-name: [a, b]
api-key: sk,1
lora: {sql: /adapters/sql}
enable-prefix-caching: false
trust-remote-code: true
enable-lora: false
page: true
revision:
"""


def test_a_file_of_flags(started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(FILE)
    monkeypatch.setenv("AENGINE_PORT", "1")
    monkeypatch.setenv("AENGINE_BACKLOG", "2")
    assert main(["serve", "--config", str(path), "--max-model-len", "8"]) == 0
    ((engine, server, listen),) = started
    assert engine == EngineConfig(
        model="owner/name", tensor_parallel_size=2, max_model_len=8, lora={"sql": "/adapters/sql"}, prefix_cache=False
    )
    assert server == ServerConfig(served_model_name=("a", "b"), api_keys=("sk,1",))
    assert (listen.port, listen.backlog) == (9000, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1\nlora-modules: [a=b]\n", "unknown prot (did you mean port?), lora-modules (did you mean lora?)"),
        (
            "speculative-config: {}",
            "unknown speculative-config (write speculation (mtp, ngram, eagle3=PATH, dflash=PATH, draft=PATH) and "
            "draft_tokens, the most tokens that a step drafts)",
        ),
        ("port: many", "port: Expected `int`, got 'many' ({path}: port)"),
        ("- port\n", "expected flags and their values, such as `port: 9000`"),
        ("a: [", "not YAML: while parsing"),
        ("!!python/object/apply:os.system ['false']", "not YAML: could not determine a constructor"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_wrong_is_named(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert told.replace("{path}", str(path)) in said
    assert str(path) in said


def test_the_greeting_has_the_addresses_and_no_secret() -> None:
    shown = greeting("http://127.0.0.1:8000", "x is ready after 1.0 s", ServerConfig(api_keys=("secret",), page=False))
    assert "Serving on http://127.0.0.1:8000 (x is ready after 1.0 s; Ctrl-C stops)" in shown
    assert "http://127.0.0.1:8000/v1\n" in shown
    assert "page" not in shown
    assert '-H "Authorization: Bearer $AENGINE_API_KEY"' in shown
    assert "secret" not in shown
    assert "a page to chat on   http://127.0.0.1:8000/\n" in greeting("http://127.0.0.1:8000", "", ServerConfig())
