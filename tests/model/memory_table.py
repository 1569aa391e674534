"""The table of GPUs and memory in `aengine/model/README.md`. `python -m tests.model.memory_table` writes it."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from aengine.cache.kv import KVShape
from aengine.model.config import ModelConfig
from bench.shapes import write_config

README = Path(__file__).parents[2] / "aengine" / "model" / "README.md"
PLACE = re.compile(r"(?<=<!-- memory -->\n).*(?=<!-- end of memory -->)", re.S)
CONTEXT = 32_768
UTILIZATION = 0.9  # the knob gpu_memory_utilization
WORKSPACE = 2 * 2**30  # bytes for a step's tensors, graphs and CUDA itself
GPUS = (16, 24, 32, 48, 80, 141)  # GiB
_MODELS = {
    "Qwen3-0.6B": "0.6b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen3-8B": "8b",
    "Qwen3.5-9B": "qwen3.5-9b",
    "Gemma 3 12B": "gemma3-12b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "gpt-oss-20b": "gpt-oss-20b",
    "GLM-4.7-Flash": "glm-4.7-flash",
    "Qwen3-30B-A3B": "moe30b",
    "Qwen3-32B": "32b",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3-235B-A22B": "moe235b",
}


def memory_table() -> str:
    """Return the table: weights in each format, KV of one long context, and the smallest GPU for both."""
    lines = [
        "| model | weights in bf16 | FP8 | 4 bits | KV of 32,768 tokens | on one GPU of: bf16 | FP8 | 4 bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with TemporaryDirectory() as folder:
        for name, shape in _MODELS.items():
            write_config(Path(folder), shape)
            model = ModelConfig.from_folder(Path(folder))
            if model.quantized is None:
                write_config(Path(folder), shape, quantization="awq")
                formats = [model, model.quantized_as("fp8"), ModelConfig.from_folder(Path(folder))]
            else:  # published only in 4 bits
                formats = [None, None, model]
            kv = kv_bytes(model)
            weights = [None if one is None else one.weight_bytes(torch.bfloat16) for one in formats]
            cells = [*map(_gib, weights), _gib(kv), *(_gpu(one, kv) for one in weights)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kv_bytes(model: ModelConfig) -> int:
    """Return the bytes of keys and values of one context in bf16. A layer with a window keeps only the window."""
    return sum(
        KVShape((paging.kv_layer(1),), 1, torch.bfloat16).page_bytes * min(paging.window or CONTEXT, CONTEXT)
        for paging in model.paging
    )


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f} GiB"


def _gpu(weights: int | None, kv: int) -> str:
    if weights is None:
        return "-"
    needed = weights + kv + WORKSPACE
    fitting = next((size for size in GPUS if size * 2**30 * UTILIZATION >= needed), None)
    if fitting is not None:
        return f"{fitting} GiB"
    count = next(count for count in (2, 4, 8) if GPUS[-1] * 2**30 * UTILIZATION >= needed / count + WORKSPACE)
    return f"{count} x {GPUS[-1]} GiB"


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: memory_table(), README.read_text()))
