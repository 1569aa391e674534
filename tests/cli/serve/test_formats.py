"""`aengine serve` answers from a mixture of experts in each quantised format as from its twin in floats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aengine.model.hub import DEMO
from tests.cli.running import served
from tests.model.quant.checkpoints import write_quantized
from tests.model.quant.schemes import SCHEMES

ASKED = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_answers_from_it(scheme: str, tmp_path: Path) -> None:
    folders = tmp_path / "quantised", tmp_path / "twin"
    write_quantized(scheme, "demo-moe", *folders)
    answers = []
    for folder in folders:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(DEMO / name, folder)
        with served(str(folder), "--kv-cache-gib", "0.05", "--max-num-seqs", "4") as server:
            answer = server.client.post("/v1/completions", json=ASKED | {"logprobs": 1})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0])
    quantised, twin = answers
    assert quantised["text"] == twin["text"]
    assert quantised["logprobs"]["token_logprobs"] == pytest.approx(twin["logprobs"]["token_logprobs"], abs=1e-3)
