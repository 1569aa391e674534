"""Files for other programs in READMEs can be parsed and name existing things. The programs are not run."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from aengine.cli.main import _parser
from aengine.cli.serve.flags import read_file
from aengine.config import ListenConfig, ServerConfig
from aengine.config.configure import configure
from aengine.http.routes import operations
from aengine.http.state import ServerState
from tests.model.memory_table import PLACE, README, memory_table

ROOT = Path(__file__).parent.parent
SERVICE = (ROOT / "aengine" / "cli" / "serve" / "README.md").read_text()
CLIENTS = (ROOT / "aengine" / "http" / "CLIENTS.md").read_text()
SECONDS = ListenConfig().shutdown_timeout
INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def block(text: str, kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", text, re.S)
    return str(found)


def parsed(words: list[str]) -> Any:
    """The arguments of `aengine`, as its parser reads them."""
    return _parser()[0].parse_args(words)


def test_the_dockerfile() -> None:
    lines = [line for line in block(SERVICE, "dockerfile").splitlines() if not line.startswith("#")]
    steps = [(line.split()[0], line.partition(" ")[2]) for line in lines]
    assert {name for name, _ in steps} == INSTRUCTIONS
    assert steps[0][0] == "FROM"
    assert ("EXPOSE", str(ListenConfig().port)) in steps
    command = json.loads(dict(steps)["ENTRYPOINT"])
    assert command[0] == "aengine"
    args = parsed([*command[1:], "Qwen/Qwen3-8B"])
    assert (args.host, args.model) == ("0.0.0.0", "Qwen/Qwen3-8B")
    health = json.loads(dict(steps)["HEALTHCHECK"].partition("CMD ")[2])
    compile(health[-1], "health", "exec")
    templates = {operation.template for operation in operations(ServerState(ServerConfig()))}
    assert {f"/{name}" for name in ("health", "ready")} <= templates
    json.loads(dict(steps)["VOLUME"])


def test_docker_waits_longer_than_answers_may_take() -> None:
    run = next(line for line in SERVICE.splitlines() if line.startswith("docker run"))
    words = shlex.split(run)
    assert float(words[words.index("--stop-timeout") + 1]) > SECONDS
    assert configure(ServerConfig, dict([words[words.index("-e") + 1].split("=")])).api_keys == ("one",)
    parsed(["serve", *words[words.index("aengine") + 1 :]])


def test_the_unit() -> None:
    text = block(SERVICE, "ini")
    assert not re.search(r"^[^#\n]+#", text, re.M)  # a comment has a line of its own
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = dict(unit["Service"])
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/aengine/bin/aengine"
    assert parsed(words).model == "Qwen/Qwen3-8B"
    assert float(service["TimeoutStopSec"]) > SECONDS
    assert service["Restart"] == "on-failure"


def test_settings_of_clients_can_be_read_and_agree() -> None:
    opencode = json.loads(block(CLIENTS, "json"))
    provider = opencode["provider"]["aengine"]
    (model,) = provider["models"]
    assert opencode["model"] == opencode["small_model"] == f"aengine/{model}"
    (entry,) = yaml.safe_load(block(CLIENTS, "yaml"))["models"]
    assert entry["model"] == model
    serve = next(line for line in CLIENTS.splitlines() if line.startswith("aengine serve"))
    assert parsed(shlex.split(serve)[1:]).served_model_name == [model]
    addresses = {provider["options"]["baseURL"], entry["apiBase"], *re.findall(r"http://localhost:\d+/v1", CLIENTS)}
    assert addresses == {f"http://localhost:{ListenConfig().port}/v1"}


def test_the_file_of_flags_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(block((ROOT / "aengine" / "cli" / "README.md").read_text(), "yaml"))
    knobs, _ = read_file(str(path))
    assert knobs == {
        "model": "Qwen/Qwen3-8B",
        "port": "9000",
        "served_model_name": ["qwen", "gpt-4"],
        "max_model_len": "32K",
    }


def test_the_table_of_gpus_is_computed_from_shapes() -> None:
    written = PLACE.search(README.read_text())
    assert written is not None
    assert written[0] == memory_table(), "python -m tests.model.memory_table writes it anew"
