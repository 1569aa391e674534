"""Mixtures of experts in each quantised format answer like their copies in floats."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from aengine.model.loading.hub import DEMO
from tests.cli.running import served
from tests.http.demo_server import demo_server
from tests.http.serving import parse_events
from tests.model.quant.checkpoints import write_quantized
from tests.model.quant.schemes import OF_MODELS
from tests.model.quant.test_mxfp4_checkpoints import write_gpt_oss

TEXT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
WHOLE_PROCESSES = ("fp8-blocks", "mxfp4")
ASKED = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def add_text(folder: Path) -> None:
    for name in TEXT:
        shutil.copy(DEMO / name, folder)


@contextmanager
def served_here(folder: Path) -> Iterator[httpx2.Client]:
    """A server in this process."""
    knobs = {"model": str(folder), "max_num_seqs": 4, "kv_cache_gib": 0.05}
    with demo_server(knobs) as url, httpx2.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield client


@contextmanager
def served_apart(folder: Path) -> Iterator[httpx2.Client]:
    """`aengine serve`, a process of its own."""
    with served(str(folder), "--kv-cache-gib", "0.05", "--max-num-seqs", "4") as server:
        yield server.client


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*OF_MODELS, "mxfp4"])
def test_a_server_answers_from_it(scheme: str, tmp_path: Path) -> None:
    """Uses a Qwen3-MoE, and gpt-oss for its own format MXFP4. Two formats run in processes of their own."""
    folders = tmp_path / "quantised", tmp_path / "twin"
    if scheme == "mxfp4":
        write_gpt_oss(*folders, vocab_size=4096)
    else:
        write_quantized(scheme, "demo-moe", *folders)
    answers = []
    for folder in folders:
        add_text(folder)
        apart = scheme in WHOLE_PROCESSES and folder.name == "quantised"
        with (served_apart if apart else served_here)(folder) as client:
            answer = client.post("/v1/completions", json=ASKED | {"logprobs": 1})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0])
    quantised, twin = answers
    assert quantised["text"] == twin["text"]
    assert quantised["logprobs"]["token_logprobs"] == pytest.approx(twin["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.gpu
def test_gpt_oss_answers_from_a_gpu(tmp_path: Path) -> None:
    """In MXFP4, its published format: the first token has its copy's probability; a stream and a chat work."""
    folders = tmp_path / "quantised", tmp_path / "twin"
    write_gpt_oss(*folders, vocab_size=4096)
    likely = []
    for folder in folders:
        add_text(folder)
        knobs = ("--device", "cuda", "--dtype", "bfloat16", "--kv-cache-gib", "0.25", "--max-num-seqs", "8")
        with served(str(folder), *knobs) as server:
            asked = ASKED | {"prompt": ["Paris", "The capital of France is", "Once upon a time " * 12], "max_tokens": 1}
            answer = server.client.post("/v1/completions", json=asked | {"logprobs": 1})
            assert answer.status_code == 200, answer.text
            likely.append([choice["logprobs"]["token_logprobs"][0] for choice in answer.json()["choices"]])
            events = parse_events(server.client.post("/generate", json=ASKED | {"max_tokens": 60}).text)
            assert sum(len(event["token_ids"]) for event in events[:-1]) == 60
            chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "ignore_eos": True}
            answer = server.client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 20
    assert likely[0] == pytest.approx(likely[1], abs=0.06)
