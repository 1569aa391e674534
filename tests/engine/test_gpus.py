"""Models on two GPUs give the same ids as on one (float32)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine import Engine, SamplingParams
from aengine.model.loading.hub import DEMO
from bench.lora import write_adapter
from tests.model.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

VOCAB = 4096
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "moe_intermediate_size": 192,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
RNG = random.Random(3)
SHORT = [[RNG.randrange(VOCAB) for _ in range(RNG.randint(3, 40))] for _ in range(12)]
KINDS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.9, seed=7, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, frequency_penalty=0.5, n=2),
]
# More rows than are summed at once, and only plain draws: each rank draws from its own tokens.
LONG = [[RNG.randrange(VOCAB) for _ in range(RNG.randint(500, 900))] for _ in range(14)]
PLAIN = [
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True),
]
Ids = list[list[tuple[int, ...]]]


def write_model(case: str, folder: Path) -> None:
    write_checkpoint(case, folder, **SHAPE)
    shutil.copy(Path(DEMO) / "tokenizer.json", folder)


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, made)
    return made


async def ids(folder: Path, ranks: int, adapters: tuple[str | None, ...] = (None,), **knobs: Any) -> Ids:
    """Return the ids of each request. The adapters take turns."""
    knobs = {"dtype": "float32", "kv_cache_gib": 0.5, "max_num_seqs": 16, "progress": False, **knobs}
    found: Ids = []
    async with Engine(model=str(folder), device="cuda", tensor_parallel_size=ranks, **knobs) as engine:
        assert len(engine.devices()) == ranks
        for prompts, kinds in ((SHORT, KINDS), (LONG, PLAIN)):
            outputs = await asyncio.gather(
                *(
                    engine.complete(prompt, kinds[number % len(kinds)], adapter=adapters[number % len(adapters)])
                    for number, prompt in enumerate(prompts)
                )
            )
            found += [[choice.token_ids for choice in output.choices] for output in outputs]
            engine.check_integrity()
    return found


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
async def test_two_gpus_draw_what_one_draws(folder: Path, graphs: bool) -> None:
    expected = await ids(folder, 1, cuda_graphs=graphs)
    assert await ids(folder, 2, cuda_graphs=graphs) == expected


async def test_adapters_change_the_same_on_two_gpus(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    lora = {f"a{rank}": str(tmp_path / f"a{rank}") for rank in (4, 16)}
    for rank in (4, 16):
        write_adapter(tmp_path / f"a{rank}", tmp_path, rank)
    adapters = (None, *lora)
    expected = await ids(tmp_path, 1, adapters, lora=lora)
    assert expected != await ids(tmp_path, 2, lora=lora)
    assert await ids(tmp_path, 2, adapters, lora=lora) == expected


STARTED = """
import asyncio, sys
from aengine import Engine, SamplingParams

async def main():
    async with Engine(sys.argv[1], device="cuda", tensor_parallel_size=2, gpu_memory_utilization=0.2) as engine:
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        print(len(output.choices[0].token_ids))

asyncio.run(main())
"""


def test_nothing_need_have_run_before_a_start_on_two_gpus(folder: Path, tmp_path: Path) -> None:
    """In a new process, because other engines leave cuBLAS initialised in their threads.

    The second process uses the measurements of the first.
    """
    command = [sys.executable, "-c", STARTED, str(folder)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
