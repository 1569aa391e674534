"""`--adapter` of `aengine generate` and `aengine chat`: the adapter answers, in this process and on a server."""

from __future__ import annotations

import io
import json

import pytest

from aengine.cli.chat.shell import Shell
from aengine.cli.model import Model
from aengine.client import Client
from tests.cli.running import run
from tests.engine.adapters import PROMPT, Written
from tests.http.demo_server import DemoEngine, hosted_demo


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("adapters"), 2)


@pytest.mark.slow
def test_generate_answers_with_an_adapter_unless_the_line_names_another(written: Written) -> None:
    lines = [
        PROMPT,
        {"prompt": PROMPT, "adapter": "a1"},
        {"prompt": PROMPT, "adapter": None},
        {"prompt": PROMPT, "adapter": "a7"},
    ]
    flags = [f"--lora={name}={path}" for name, path in written.paths.items()]
    flags += ["--adapter", "a0", "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "true", "--token-ids"]
    done = run("generate", *flags, "--dtype", "float32", given="\n".join(map(json.dumps, lines)))
    first, second, base, unknown = map(json.loads, done.stdout.splitlines())
    assert first["token_ids"] == written.greedy(written.merged, PROMPT, 12)
    assert base["token_ids"] == written.greedy(written.base, PROMPT, 12)
    assert second["token_ids"] not in (first["token_ids"], base["token_ids"])
    assert "'a7' is not loaded" in unknown["error"]["message"]
    assert done.returncode == 1


@pytest.mark.anyio
async def test_an_adapter_chats_in_this_process_and_on_a_server(written: Written) -> None:
    async def says(model: Model, adapter: str | None) -> str:
        def read(prompt: str) -> str:
            if lines:
                return lines.pop()
            raise EOFError

        lines, out = ["hi"], io.StringIO()
        sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        await Shell(model, out, sampling, adapter=adapter, dim=False).run(read)
        return out.getvalue().rpartition("\n[12 tokens")[0] or out.getvalue()

    engine = DemoEngine(lora=written.paths, dtype="float32")
    async with hosted_demo(engine) as url, Client(url) as client:
        adapted = await says(engine, "a0")
        assert adapted == await says(client, "a0")
        assert adapted != await says(engine, None)
        for model in (engine, client):
            assert "'a7'" in await says(model, "a7")
