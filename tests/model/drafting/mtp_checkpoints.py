"""Small random checkpoints with an MTP layer, in the layouts in which families publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.model.checkpoints import write_checkpoint

_FILE = "model.safetensors"
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# By case: the sizes that differ from `CASES`, and the settings of config.json that name the layer.
MTP_CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "qwen3": ({}, {"mtp_num_hidden_layers": 1, "mtp_intermediate_size": 40}),
    "qwen3-5": ({}, {"mtp_num_hidden_layers": 1}),
    "qwen3-5-wrapped": ({}, {"mtp_num_hidden_layers": 1}),
    "qwen3-next": ({}, {}),  # published files do not name it
    "deepseek-v3": ({"rope_parameters": _PLAIN_ROPE}, {"num_nextn_predict_layers": 1}),
    "glm4-moe-qk-norm-groups": ({}, {"num_nextn_predict_layers": 1}),
    "glm4-flash": ({}, {"num_nextn_predict_layers": 1}),
}


def write_mtp_checkpoint(case: str, folder: Path, **sizes: object) -> PreTrainedModel:
    """Write a random model with an MTP layer, and return the model without that layer. sizes: of its configuration."""
    changes, settings = MTP_CASES[case]
    model = write_checkpoint(case, folder, **{**changes, **sizes})
    change_text_config(folder, **settings)
    tensors = load_file(folder / _FILE)
    save_file({**tensors, **mtp_tensors(case, tensors, settings)}, folder / _FILE, {"format": "pt"})
    return model


def change_text_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.get("text_config", values).update(changes)
    path.write_text(json.dumps(values))


def text_config(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = values.get("text_config", values)
    return found


def mtp_tensors(case: str, tensors: dict[str, Tensor], settings: dict[str, object]) -> dict[str, Tensor]:
    """Return random tensors of an MTP layer that is like the model's last layer."""
    [start] = {name.split("layers.")[0] for name in tensors if ".self_attn.o_proj.weight" in name}
    last = max(int(name.removeprefix(f"{start}layers.").split(".")[0]) for name in tensors if f"{start}layers." in name)
    before = f"{start}layers.{last}."
    hidden = tensors[f"{before}input_layernorm.weight"].shape[0]
    shapes = {name.removeprefix(before): list(tensor.shape) for name, tensor in tensors.items() if before in name}
    if (inner := settings.get("mtp_intermediate_size")) is not None:
        shapes = {name: [inner if size == 96 else size for size in shape] for name, shape in shapes.items()}
    if case.startswith("qwen"):
        names = {f"mtp.layers.0.{name}": shape for name, shape in shapes.items()}
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        names["mtp.fc.weight"] = [hidden, 2 * hidden]
    else:
        prefix = f"model.layers.{last + 1}"
        names = {f"{prefix}.{name}": shape for name, shape in shapes.items()}
        norms = f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.shared_head.norm"
        names[f"{prefix}.eh_proj.weight"] = [hidden, 2 * hidden]
        for copy in ("embed_tokens", "shared_head.head"):  # the numbers differ, so that reading them would be seen
            names[f"{prefix}.{copy}.weight"] = list(tensors["lm_head.weight"].shape)
    names |= {f"{norm}.weight": [hidden] for norm in norms}
    generator = torch.Generator().manual_seed(3)
    adds_one = case.startswith(("qwen3-5", "qwen3-next"))

    def random(name: str, shape: list[int]) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return numbers * (0.5 if "experts" in name or "mlp" in name else 0.25)
        centre = 0.0 if adds_one or name.endswith("bias") else 1.0
        return centre + 0.25 * numbers

    return {name: random(name, shape) for name, shape in names.items()}
