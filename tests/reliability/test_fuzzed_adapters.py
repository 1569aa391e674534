"""Adapters with settings and headers made up by hypothesis: each is read or ends in an `AdapterError`, nothing else.

As many cases as hypothesis' profile says; `FUZZ_CASES` names another number.
"""

from __future__ import annotations

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

from aengine.errors import AdapterError
from aengine.model.config import ModelConfig
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.linears import Linears
from aengine.model.lora.memory import Adapter
from aengine.model.lora.read import read_adapter
from aengine.model.lora.room import LoraRoom, kind_of

from .test_fuzzed_weights import CHANGES, CONFIG, VALUES, change

MIXTURE = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1}
MIXTURE |= {"moe_intermediate_size": 3, "head_dim": 4}
SOUND = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
EXPERTS = "base_model.model.model.layers.0.mlp.experts"
FIELDS = st.one_of(
    st.sampled_from([*SOUND, "alpha_pattern", "rank_pattern", "layers_to_transform", "layers_pattern", "use_rslora"]),
    st.sampled_from(["exclude_modules", "target_parameters", "peft_version", "init_lora_weights", "bias", "task_type"]),
    st.text(max_size=5),
)
SETTINGS = st.dictionaries(
    FIELDS, st.one_of(VALUES, st.sampled_from(["q_proj", "all-linear", "0.18", "0.19.1", {"q_proj": 3}])), max_size=3
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Linears, LoraRoom]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    linears = adaptable_linears(ModelConfig.from_folder(folder))
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{q_proj}.lora_A.weight": torch.ones(2, 4),
        f"{q_proj}.lora_B.weight": torch.ones(4, 2),
        f"{EXPERTS}.base_layer.lora_A.weight": torch.ones(4, 4),
        f"{EXPERTS}.base_layer.lora_B.weight": torch.ones(6, 4),
        f"{EXPERTS}.lora_A.weight": torch.ones(4, 3),
        f"{EXPERTS}.lora_B.weight": torch.ones(4, 4),
    }
    save_file(tensors, folder / "sound.safetensors")
    return folder, linears, LoraRoom(places=1, rank=8, kinds=tuple({kind_of(site) for site in linears.sites}))


def read(subject: tuple[Path, Linears, LoraRoom]) -> Adapter | None:
    folder, linears, room = subject
    try:
        return read_adapter(folder, linears, room, torch.float32)
    except AdapterError:
        return None


def test_the_sound_one_is_read(subject: tuple[Path, Linears, LoraRoom]) -> None:
    folder, _, _ = subject
    (folder / "adapter_config.json").write_text(json.dumps(SOUND | {"peft_version": "0.21.2"}))
    (folder / "adapter_model.safetensors").write_bytes((folder / "sound.safetensors").read_bytes())
    adapter = read(subject)
    assert adapter is not None
    assert len(adapter.linears) == 5  # q, and both products of two experts


@settings(max_examples=int(os.environ.get("FUZZ_CASES", settings.default.max_examples)))
@given(
    fields=SETTINGS,
    changes=st.lists(st.tuples(st.integers(0, 30), CHANGES), max_size=3),
    length=st.sampled_from([0, 0, 0, 1, -1, 8, 2**20, 2**62]),
    data=st.sampled_from([400, 400, 4, -4, -400]),
    text=st.sampled_from([None, None, None, b"", b"[]", b"\xff", b'{"r":' + b"[" * 5000]),
)
def test_only_errors_of_ours(
    subject: tuple[Path, Linears, LoraRoom],
    fields: dict[str, Any],
    changes: list[tuple[int, tuple[str, Any]]],
    length: int,
    data: int,
    text: bytes | None,
) -> None:
    folder, _, _ = subject
    content = (folder / "sound.safetensors").read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])
    for at, (kind, value) in changes:
        change(header, at, kind, value)
    encoded = json.dumps(header).encode("utf-8", "surrogatepass")
    tensors = content[first:][: data if data < 0 else None] + bytes(data if 0 < data < 400 else 0)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded) + length) + encoded + tensors)
    wanted = json.dumps(SOUND | fields).encode("utf-8", "surrogatepass") if text is None else text
    (folder / "adapter_config.json").write_bytes(wanted)
    adapter = read(subject)
    assert adapter is None or 1 <= adapter.rank <= 8
