"""A quantised checkpoint gives the logits of its dequantised twin, on the CPU in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import open_checkpoint
from tests.model.loading_one import load_model

from ..harness import Harness
from .checkpoints import write_quantized
from .schemes import slow_but_some

PROMPTS = [list(range(1, 20)), [7, 3, 7]]
CASES = [
    "mixtral",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3-bias-untied", "qwen2-moe")),
]


def logits(folder: Path) -> list[torch.Tensor]:
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
    return [torch.stack(one.logits) for one in Harness(decoder, page_size=16).generate(PROMPTS, 4)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", slow_but_some())
def test_logits_are_those_of_the_dequantised_twin(scheme: str, case: str, tmp_path: Path) -> None:
    write_quantized(scheme, case, tmp_path / "quantised", tmp_path / "twin")
    for ours, expected in zip(logits(tmp_path / "quantised"), logits(tmp_path / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("scheme", slow_but_some())
def test_tensors_of_another_shape_or_dtype_are_refused_by_name(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "qwen3", tmp_path, tmp_path / "twin")
    config, file = ModelConfig.from_folder(tmp_path), tmp_path / "model.safetensors"
    decoder, tensors = Decoder(config, TorchKernels(), TorchAttention()), load_file(file)
    for name in [name for name in tensors if ".layers.1.mlp.up_proj." in name]:
        for wrong, why in ((torch.zeros(3, 5, 7), "has shape"), (torch.zeros(tensors[name].shape).bool(), "is BOOL")):
            save_file(tensors | {name: wrong.to(tensors[name].dtype) if why == "has shape" else wrong}, file)
            with pytest.raises(WeightsError, match=f"{name} {why}"):
                open_checkpoint(tmp_path, decoder)


@pytest.mark.parametrize("scheme", ["gptq", "gptq-desc-act"])
def test_rows_whose_last_group_is_shorter(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "qwen3", tmp_path / "quantised", tmp_path / "twin", intermediate_size=104)
    for ours, expected in zip(logits(tmp_path / "quantised"), logits(tmp_path / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_float_matrix_that_nothing_ignores(wrapped: bool, tmp_path: Path) -> None:
    """Writers do not quantise the output matrix, and do not always say so."""
    write_quantized("ct-int4", "mistral3" if wrapped else "llama2", tmp_path / "quantised", tmp_path / "twin")
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"].pop("ignore") == ["lm_head"]
    path.write_text(json.dumps(config))
    for ours, expected in zip(logits(path.parent), logits(tmp_path / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dot", [".", r"\."])
def test_patterns_may_name_modules_as_they_are_within_a_model_that_sees(dot: str, tmp_path: Path) -> None:
    write_quantized("ct-int4", "mistral3", tmp_path / "quantised", tmp_path / "twin")
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [
        f"re:model{dot}language_model{dot}layers.*_proj"
    ]
    path.write_text(json.dumps(config))
    assert torch.equal(torch.stack(logits(path.parent)), torch.stack(logits(tmp_path / "twin")))


def test_biases_that_the_model_does_not_have_may_be_there_if_they_are_zero(tmp_path: Path) -> None:
    """AutoGPTQ wrote a bias for every matrix."""
    folder, name = tmp_path / "quantised", "model.layers.1.mlp.up_proj.bias"
    write_quantized("gptq", "llama2", folder, tmp_path / "twin")
    stored = load_file(folder / "model.safetensors")
    matrices = [matrix for matrix in stored if matrix.endswith(".qweight")]
    stored |= {one.replace("qweight", "bias"): torch.zeros(stored[one].shape[1]).half() for one in matrices}
    save_file(stored, folder / "model.safetensors")
    assert torch.equal(torch.stack(logits(folder)), torch.stack(logits(tmp_path / "twin")))

    stored[name][5] = -0.5
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name} is not zero"):
        logits(folder)
