"""Weights files with headers made up by hypothesis: each loads or ends in a `WeightsError`, nothing else.

As many cases as hypothesis' profile says; `FUZZ_CASES` names another number.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import entries_of
from tests.model.loading_one import load_model

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig.from_folder(made)
    entries = entries_of(Decoder(model, TorchKernels(), TorchAttention()).groups)
    save_file({name: torch.ones(entry.shape) for name, entry in entries.items()}, made / "sound.safetensors")
    return made


NUMBERS = st.one_of(
    st.integers(-8, 200), st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=4), st.sampled_from(["F32", "BF16"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
DTYPES = st.sampled_from(["F32", "F16", "BF16", "I64", "F64", "U8", "BOOL", "F8_E5M2", "f32", ""])
OFFSETS = st.lists(NUMBERS, min_size=1, max_size=3)
CHANGES = st.one_of(
    st.tuples(st.just("dtype"), st.one_of(DTYPES, VALUES)),
    st.tuples(st.just("shape"), st.one_of(st.lists(NUMBERS, max_size=9), VALUES)),
    st.tuples(st.just("data_offsets"), st.one_of(OFFSETS, VALUES)),
    st.tuples(st.sampled_from(["drop", "rename", "copy", "replace", "extra key"]), VALUES),
)


def change(header: dict[str, Any], at: int, kind: str, value: Any) -> None:
    names = sorted(header)
    if not names:
        return
    name = names[at % len(names)]
    match kind:
        case "drop":
            del header[name]
        case "rename":
            header[str(value)] = header.pop(name)
        case "copy":
            header[f"{name}{value}"] = copy.deepcopy(header[name])
        case "replace":
            header[name] = value
        case "extra key" if isinstance(header[name], dict):
            header[name][str(value)] = value
        case _ if isinstance(header[name], dict):
            header[name][kind] = value


@settings(max_examples=int(os.environ.get("FUZZ_CASES", settings.default.max_examples)))
@given(
    changes=st.lists(st.tuples(st.integers(0, 30), CHANGES), max_size=3),
    length=st.one_of(st.just(0), st.sampled_from([1, -1, 8, 2**20, 2**62, -(2**62)])),
    data=st.integers(-400, 400),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=2),
)
def test_only_errors_of_ours(
    folder: Path,
    changes: list[tuple[int, tuple[str, Any]]],
    length: int,
    data: int,
    flips: list[tuple[int, int]],
) -> None:
    content = (folder / "sound.safetensors").read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])
    for at, (kind, value) in changes:
        change(header, at, kind, value)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    claimed = (len(text) + (length if not changes else 0)) % 2**64
    tensors = content[first:][: data if data < 0 else None] + bytes(max(data - 200, 0))
    damaged = bytearray(struct.pack("<Q", claimed) + text + tensors)
    for at, byte in flips if not changes else []:
        damaged[at % len(damaged)] = byte
    (folder / "model.safetensors").write_bytes(damaged)
    model = ModelConfig.from_folder(folder)
    try:
        decoder = load_model(
            folder,
            model,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernels=TorchKernels(),
            attention=TorchAttention(),
        )
    except WeightsError:
        return
    assert decoder.config == model
