"""Tiny checkpoints in every quantised format. Each has a twin with the same numbers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoints import write_checkpoint
from .encoders import Scheme
from .schemes import SCHEMES

_FILE = "model.safetensors"
# Linears that are fused, so their columns must be in one order.
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"} | dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "in")
_FUSED |= {"q_a_proj": "down", "kv_a_proj_with_mqa": "down"}


def write_quantized(
    scheme: str | Scheme,
    case: str,
    folder: Path,
    twin: Path,
    write: Callable[..., object] = write_checkpoint,
    **sizes: object,
) -> None:
    """Write a random model of `case` (a key of the `CASES` of tests/model/checkpoints.py) into both folders.

    `folder` has it in the format `scheme` (or a key of `SCHEMES`), `twin` the same matrices dequantised, in float32;
    what is not quantised is equal in both. The two compute the same but for the quantisation of activations.

    write: writes the twin. sizes: as it takes them.
    """
    write(case, twin, **sizes)
    chosen = scheme if isinstance(scheme, Scheme) else SCHEMES[scheme]
    plain = load_file(twin / _FILE)
    stored: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        if not is_linear(name) or is_in(module, chosen.unchanged):
            stored[name] = tensor
            continue
        layer, _, last = module.rpartition(".")
        generator = torch.Generator().manual_seed(sum(f"{layer}.{_FUSED.get(last, last)}".encode()))
        encoded = chosen.encode(tensor.float(), generator)
        stored.update({f"{module}.{suffix}": part.contiguous() for suffix, part in encoded.tensors.items()})
        plain[name] = encoded.meant
    folder.mkdir(parents=True, exist_ok=True)
    for path in twin.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((twin / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": chosen.config}))
    save_file(stored, folder / _FILE, {"format": "pt"})
    save_file(plain, twin / _FILE, {"format": "pt"})


def is_linear(name: str) -> bool:
    """Return whether formats quantise a parameter: it is not an embedding, norm, bias or router."""
    endings = ("_proj.weight", "_proj_with_mqa.weight", "lm_head.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    endings = (*endings, "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight", ".c_fc.weight")
    return name.endswith((*endings, "in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"))


def is_in(module: str, parts: Iterable[str]) -> bool:
    return any(f".{part}." in f".{module}." for part in parts)
