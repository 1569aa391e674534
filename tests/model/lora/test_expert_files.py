"""Adapters of experts from other versions of PEFT: one by one, or fused with exchanged axes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from aengine.errors import AdapterError
from aengine.model.config import ModelConfig

from ..checkpoints import write_checkpoint
from .adapters import assert_mixed, load, room_for, write_adapter

RANK, ALPHA = 3, 6
SCALE = ALPHA / RANK
NAMES = {"qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def write(folder: Path, tensors: dict[str, Tensor], **settings: object) -> None:
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))


FILE = "adapter_model.safetensors"


@pytest.mark.parametrize("case", NAMES)
def test_each_expert_by_itself(case: str, tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    merged, generator = copy.deepcopy(base), torch.Generator().manual_seed(5)
    block, gate, up, down = NAMES[case]
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(merged.model.layers):
        experts = layer.mlp.experts
        gates, ups = experts.gate_up_proj.data.chunk(2, dim=1)  # [experts, inner, hidden] each
        for part, matrices in ((gate, gates), (up, ups), (down, experts.down_proj.data)):
            for expert, matrix in enumerate(matrices):
                a = torch.randn(RANK, matrix.shape[1], generator=generator) * 0.2
                b = torch.randn(matrix.shape[0], RANK, generator=generator) * 0.2
                name = f"model.layers.{index}.{block}.experts.{expert}.{part}"
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
                matrix += SCALE * b @ a
    write(tmp_path / "adapter", tensors, target_modules=[gate, up, down])
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])


def exchanged(folder: Path, base: PreTrainedModel, **settings: object) -> PreTrainedModel:
    """Write and merge an adapter as PEFT did up to 0.18."""
    merged, generator = copy.deepcopy(base), torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(merged.model.layers):
        experts = layer.mlp.experts
        for wrapper, matrices in ((".base_layer", experts.gate_up_proj), ("", experts.down_proj)):
            count, first, second = matrices.shape
            a = torch.randn(count * RANK, first, generator=generator) * 0.2
            b = torch.randn(second, RANK * count, generator=generator) * 0.2
            name = f"model.layers.{index}.mlp.experts{wrapper}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            a, b = a.reshape(count, RANK, first), b.reshape(second, RANK, count)
            matrices.data += SCALE * torch.einsum("o r e, e r i -> e i o", b, a)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    write(folder, tensors, target_parameters=parameters, **settings)
    return merged


def test_all_in_one_with_inputs_and_outputs_exchanged(tmp_path: Path) -> None:
    base = write_checkpoint("mixtral", tmp_path / "base")
    merged = exchanged(tmp_path / "adapter", base)
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])


def test_where_shapes_do_not_tell_the_version_does(tmp_path: Path) -> None:
    base = write_checkpoint("qwen3-moe", tmp_path / "base")  # the hidden width is twice the inner one
    merged = exchanged(tmp_path / "adapter", base, peft_version="0.18.1")
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])
    exchanged(tmp_path / "unversioned", base)
    with pytest.raises(AdapterError, match=r"experts\.base_layer\.lora_A\.weight fits several matrices.*PEFT 0\.19"):
        load(tmp_path / "base", [tmp_path / "unversioned"])


def test_where_both_matrices_have_one_shape_their_order_tells(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64, "head_dim": 16}
    base = write_checkpoint("qwen3-moe", tmp_path / "base", **sizes)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    merged = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=parameters)
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])


def test_shapes_of_no_matrix_are_refused(tmp_path: Path) -> None:
    base = write_checkpoint("mixtral", tmp_path / "base")
    exchanged(tmp_path / "adapter", base)
    tensors = load_file(tmp_path / "adapter" / FILE)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    config = ModelConfig.from_folder(tmp_path / "base")
    for wrong in (tensors[name][:-1], tensors[name][:, :-1], tensors[name][:0]):
        save_file(tensors | {name: wrong.contiguous()}, tmp_path / "adapter" / FILE)
        with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.experts\.lora_A|layers\.0\.mlp\.experts"):
            room_for(config, [tmp_path / "adapter"])


@pytest.mark.parametrize(
    ("case", "router"),
    [
        ("qwen3-moe", "mlp.gate"),
        ("gpt-oss", "mlp.router"),
        ("mixtral", "mlp.gate"),  # block_sparse_moe.gate in its checkpoints
        ("gemma4-moe", "router.proj"),
    ],
)
def test_an_adapter_of_a_router_is_refused_as_one(case: str, router: str, tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=[f"{router}.weight"])
    with pytest.raises(
        AdapterError, match=rf"adapter: .*layers\.0\.{router}\.lora_A.* the router of a layer's experts"
    ):
        room_for(ModelConfig.from_folder(tmp_path / "base"), [tmp_path / "adapter"])
