"""A checkpoint of floats that is quantised to FP8 while it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import ConfigError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.dense import in_fp8
from tests.model.loading_one import load_model

from .checkpoints import write_checkpoint
from .harness import Harness
from .quant.checkpoints import write_quantized

PARTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
ALONE = ("o_proj.weight", "down_proj.weight", "w2.weight", "q_b_proj.weight")
LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "q_lora_rank": 128, "qk_nope_head_dim": 48, "v_head_dim": 32}


def logits(folder: Path, config: ModelConfig) -> torch.Tensor:
    decoder = load_model(
        folder,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
    return torch.stack(Harness(decoder, page_size=16).generate([list(range(1, 20))], 2)[0].logits)


def rounded(folder: Path) -> None:
    """Replace the weights by what they stand for after quantising. Fused parts are quantised together.

    The output matrix and the matrix of keys and values from latents stay as they are.
    """
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if name.endswith(ALONE) and (len(weights[name]) >= 128 or ".experts." in name):
            weights[name] = in_fp8(weights[name]).dequantize()
    for parts in PARTS:
        for first in [name for name in weights if name.endswith(f"{parts[0]}.weight")]:
            names = [first.replace(parts[0], part) for part in parts]
            if not all(name in weights for name in names):
                continue
            whole = torch.cat([weights[name] for name in names])
            if len(whole) >= 128 or ".experts." in first:
                pieces = in_fp8(whole).dequantize().split([len(weights[name]) for name in names])
                weights.update({name: piece.contiguous() for name, piece in zip(names, pieces)})
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("case", "sizes"), [("qwen3", {}), ("mixtral", {}), ("deepseek-v3", LATENT)])
def test_it_computes_with_the_rounded_weights(case: str, sizes: dict[str, object], tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path, **sizes)
    config = ModelConfig.from_folder(tmp_path)
    plain, quantized = logits(tmp_path, config), logits(tmp_path, config.quantized_as("fp8"))
    assert not torch.allclose(plain[0], quantized[0], atol=1e-3)
    rounded(tmp_path)
    torch.testing.assert_close(quantized[0], logits(tmp_path, config)[0], atol=1e-4, rtol=0)


def test_a_quantised_checkpoint_has_its_own_format_and_no_other(tmp_path: Path) -> None:
    write_quantized("fp8-blocks", "qwen3", tmp_path / "quantised", tmp_path / "twin")
    model = ModelConfig.from_folder(tmp_path / "quantised")
    assert model.quantized_as("fp8") is model
    with pytest.raises(ConfigError, match="awq was asked for, the checkpoint has fp8; use auto"):
        model.quantized_as("awq")
