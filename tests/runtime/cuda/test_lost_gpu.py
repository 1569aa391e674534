"""A fault on the device ends the engine: every waiting request fails at once, and closing the engine works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 4095,
}
# In a process of its own: nothing there can use the device afterwards.
PROGRAM = """
import asyncio, sys, torch, aengine

async def main():
    knobs = {"load_format": "dummy", "device": "cuda", "progress": False, "kv_cache_gib": 0.5, "max_num_seqs": 4}
    async with aengine.Engine(sys.argv[1], **knobs) as engine:
        stream = engine.generate([1, 2, 3], max_tokens=8000, ignore_eos=True)
        await anext(stream)
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]  # the device asserts that 9 is an index
        try:
            async for _ in stream:
                pass
        except aengine.EngineFailedError:
            print("the stream is told")
        await asyncio.wait_for(engine.failed.wait(), 10)
        print("because of a", type(engine.failure).__name__)
        try:
            await engine.complete([1], max_tokens=1)
        except aengine.EngineFailedError:
            print("newcomers are refused")

asyncio.run(main())
print("left")
"""


def test_an_assert_on_the_device_ends_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    told = [line for line in done.stdout.splitlines() if line]
    expected = ["the stream is told", "because of a DeviceLostError", "newcomers are refused", "left"]
    assert told == expected, done.stderr[-2000:]
