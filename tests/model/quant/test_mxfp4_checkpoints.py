"""Whole checkpoints of mixtures in MXFP4, with gpt-oss's names: they give the logits of their twin, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.errors import WeightsError

from ..checkpoints import write_checkpoint
from ..ranks import Ranks
from .encoders import mxfp4
from .test_logits import logits

_FILE = "model.safetensors"
_BLOCK = "model.layers.0.mlp"


def write_mxfp4(folder: Path, twin: Path, **sizes: object) -> None:
    """Write a mixture with experts in MXFP4, whose rows of gate and up alternate, and its dequantised twin."""
    write_checkpoint("qwen3-moe", twin, **sizes)
    config, plain = json.loads((twin / "config.json").read_text()), load_file(twin / _FILE)
    stored = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        names = {
            part: [f"{experts}.{expert}.{part}_proj.weight" for expert in range(config["num_local_experts"])]
            for part in ("gate", "up", "down")
        }
        gate, up, down = (torch.stack([plain[name] for name in group]) for group in names.values())
        gate_up = mxfp4(torch.stack((gate, up), 2).flatten(1, 2))  # [experts, 2 * inner, hidden]
        encoded_down = mxfp4(down)
        for fused, encoded in (("gate_up_proj", gate_up), ("down_proj", encoded_down)):
            stored |= {f"{experts}.{fused}{suffix}": part for suffix, part in encoded.tensors.items()}
        meant = gate_up.meant[:, 0::2], gate_up.meant[:, 1::2], encoded_down.meant
        for group, matrices in zip(names.values(), meant):
            plain |= {name: matrix.contiguous() for name, matrix in zip(group, matrices)}
    folder.mkdir()
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(stored, folder / _FILE, {"format": "pt"})
    save_file(plain, twin / _FILE, {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mxfp4")
    write_mxfp4(folder / "quantised", folder / "twin")
    return folder / "quantised", folder / "twin"


def test_logits_are_those_of_the_dequantised_twin(folders: tuple[Path, Path]) -> None:
    for ours, expected in zip(*map(logits, folders), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("columns", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_ranks_compute_the_same(columns: int, tmp_path: Path) -> None:
    """Each rank has some of the experts, or half of the columns of each if these are whole groups."""
    write_mxfp4(tmp_path / "quantised", tmp_path / "twin", moe_intermediate_size=columns)
    prompts = [list(range(1, 20)), [7, 3, 7]]
    [alone] = Ranks(tmp_path / "twin", 1).generate(prompts, 4)
    for sequences in Ranks(tmp_path / "quantised", 2).generate(prompts, 4):
        for ours, expected in zip(sequences, alone, strict=True):
            torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{_BLOCK}.experts.gate_up_proj_bias", (7, 64)),
        (f"{_BLOCK}.experts.down_proj_bias", (7, 64)),
        (f"{_BLOCK}.gate.bias", (7,)),
        (f"{_BLOCK}.router.bias", (7,)),
        ("model.layers.0.self_attn.sinks", (4,)),
    ],
)
def test_what_no_block_adds_is_refused_by_name(
    name: str, shape: tuple[int, ...], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    quantised, _ = folders
    (tmp_path / "config.json").write_bytes((quantised / "config.json").read_bytes())
    save_file({**load_file(quantised / _FILE), name: torch.ones(shape)}, tmp_path / _FILE, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"the weights hold {name}, which this model does not have"):
        logits(tmp_path)


def write_gpt_oss(folder: Path, twin: Path, **sizes: object) -> None:
    """Write gpt-oss as it is published, and its dequantised twin."""
    write_checkpoint("gpt-oss", twin, **sizes)
    config, plain = json.loads((twin / "config.json").read_text()), load_file(twin / _FILE)
    stored = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        encoded = mxfp4(stored.pop(name).transpose(1, 2).contiguous())
        stored |= {f"{name}{suffix}": part for suffix, part in encoded.tensors.items()}
        plain[name] = encoded.meant.transpose(1, 2).contiguous()
    folder.mkdir()
    unchanged = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": unchanged}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(stored, folder / _FILE, {"format": "pt"})
    save_file(plain, twin / _FILE, {"format": "pt"})


@pytest.mark.slow
def test_gpt_oss_with_its_biases_is_its_dequantised_twin(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "quantised", tmp_path / "twin")
    for ours, expected in zip(logits(tmp_path / "quantised"), logits(tmp_path / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)
