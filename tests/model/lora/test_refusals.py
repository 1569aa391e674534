"""Fields, tensors and files that cannot be applied exactly are refused by name. Harmless fields are accepted."""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from aengine.errors import AdapterError
from aengine.model.config import ModelConfig
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.linears import Linears
from aengine.model.lora.read import read_adapter
from aengine.model.lora.room import LoraRoom

from ..checkpoints import write_checkpoint
from .adapters import assert_mixed, load, quiet, room_for, write_adapter

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ModelConfig]:
    folder = tmp_path_factory.mktemp("base")
    return write_checkpoint("qwen3-bias-untied", folder), ModelConfig.from_folder(folder)


@pytest.fixture(scope="module")
def sound(base: tuple[PreTrainedModel, ModelConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an adapter of q_proj and v_proj."""
    folder = tmp_path_factory.mktemp("sound") / "adapter"
    write_adapter(base[0], folder, target_modules=["q_proj", "v_proj"])
    return folder


@pytest.fixture
def adapter(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of it, for a test to damage."""
    return Path(shutil.copytree(sound, tmp_path / "adapter"))


@pytest.fixture
def read(base: tuple[PreTrainedModel, ModelConfig], adapter: Path) -> Callable[[], object]:
    room = room_for(base[1], [adapter])
    linears = adaptable_linears(base[1])
    return lambda: read_adapter(adapter, linears, room, torch.float32)


def change(adapter: Path, **fields: object) -> None:
    settings = json.loads((adapter / SETTINGS).read_text())
    (adapter / SETTINGS).write_text(json.dumps(settings | fields))


def change_tensors(adapter: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(adapter / FILE)
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(tensors, adapter / FILE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "LOHA", "'LOHA' is not supported, only LORA"),
        ("peft_type", None, "is missing"),
        ("use_dora", True, "DoRA scales the whole weight"),
        ("use_qalora", True, "QA-LoRA"),
        ("lora_bias", True, "biases of lora_B"),
        ("modules_to_save", ["lm_head"], "whole modules are stored"),
        ("trainable_token_indices", [1, 2], "embeddings of single tokens"),
        ("trainable_token_indices", {"embed_tokens": [3]}, "embeddings of single tokens"),
        ("layer_replication", [[0, 1], [0, 1]], "layers are repeated"),
        ("alora_invocation_tokens", [5], "in the middle of a prompt"),
        ("use_bdlora", {"nblocks": 2}, "block-diagonal"),
        ("arrow_config", {"top_k": 1}, "routed"),
        ("kasa_config", {"beta": 1}, "base weights"),
        ("monteclora_config", {"a": 1}, "distribution"),
        ("ensure_weight_tying", True, "would change the embedding"),
        ("init_lora_weights", "pissa", "belong to changed base weights"),
        ("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "belong to changed base weights"),
        ("init_lora_weights", "loftq", "belong to changed base weights"),
        ("init_lora_weights", 1, "belong to changed base weights"),
        ("task_type", "SEQ_CLS", "only adapters of causal language models"),
        ("bias", "some", "which PEFT does not write"),
        ("a_new_idea", {"scale": 2}, "not known here"),
        ("a\x1b[2Jb", 1, "not known here"),
        ("r", 0, "must be an integer from 1 to 256"),
        ("r", 257, "must be an integer from 1 to 256"),
        ("r", 8, r"\(or rank_pattern\) makes the rank of model.layers.0.self_attn.q_proj 8, its factors have 4"),
        ("lora_alpha", "much", "must be a number"),
        ("lora_alpha", 1e300, "must be a number"),
        ("use_rslora", "yes", "must be true or false"),
        ("rank_pattern", {"q_proj": 2}, None),
        ("rank_pattern", ["q_proj"], "must be an object"),
        ("alpha_pattern", {"(q|v)_proj": 2}, "holds a regular expression"),
        ("alpha_pattern", {"(a+)+$": 2}, "holds a regular expression"),
        ("alpha_pattern", {"q_proj": "x"}, None),
        ("target_modules", ["q_proj"], None),
        ("target_modules", [1], "must be a list of strings"),
        ("target_modules", ["x"] * 70000, "more than any model has modules"),
        ("exclude_modules", ["v_proj"], None),
        ("layers_to_transform", 0, None),
        ("layers_to_transform", "all", "must be a list of integers"),
    ],
)
def test_a_field_is_refused_by_its_name(
    field: str, value: object, message: str | None, adapter: Path, read: Callable[[], object]
) -> None:
    change(adapter, **{field: value})
    field = field if field.isprintable() else re.escape(repr(field))
    words = {
        "target_modules": "target_modules",
        "exclude_modules": "target_modules, exclude_modules",
        "layers_to_transform": "layers_to_transform",
        "rank_pattern": "rank_pattern",
        "alpha_pattern": "q_proj must be a number",
    }
    with pytest.raises(AdapterError, match=f"{SETTINGS}: {field}.*{message}" if message else words[field]):
        read()


@pytest.mark.parametrize(
    "fields",
    [
        {"fan_in_fan_out": True},  # PEFT resets it for linears
        {"lora_dropout": 0.1, "inference_mode": False, "revision": "main", "base_model_name_or_path": "other/base"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"bias": "all"},  # the file has none
        {"modules_to_save": [], "layers_to_transform": [], "a_new_idea": None, "another": False},
        {"target_modules": r"((a+)+)+\..*"},  # it would backtrack for ever
        {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
        {"rank_pattern": {"(k|o)_proj": 9}},
        {"task_type": "CAUSAL_LM", "lora_alpha": 6.5},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, object], adapter: Path, read: Callable[[], object]) -> None:
    change(adapter, **fields)
    read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{PREFIX}.lora_A.weight": None}, r"layers\.1\.self_attn\.q_proj lacks lora_A\.weight"),
        ({f"{PREFIX}.lora_B.weight": None}, r"layers\.1\.self_attn\.q_proj lacks lora_B\.weight"),
        (
            {f"{PREFIX}.lora_A.weight": torch.ones(4, 63)},
            r"lora_A\.weight has shape \[4, 63\], .*\[4, 64\].*another base",
        ),
        ({f"{PREFIX}.lora_B.weight": torch.ones(63, 4)}, r"lora_B\.weight has shape \[63, 4\].*another base"),
        ({f"{PREFIX}.lora_B.weight": torch.ones(64, 5)}, r"lora_B\.weight has shape \[64, 5\]"),
        ({f"{PREFIX}.lora_A.weight": torch.ones(4, 8, 8)}, r"has shape \[4, 8, 8\]; factors are non-empty matrices"),
        ({f"{PREFIX}.lora_A.weight": torch.ones(0, 64)}, r"has shape \[0, 64\]; factors are non-empty matrices"),
        ({f"{PREFIX}.lora_A.weight": torch.full((4, 64), torch.nan)}, r"lora_A\.weight holds NaN or infinity"),
        ({f"{PREFIX}.lora_A.weight": torch.ones(4, 64, dtype=torch.int64)}, r"lora_A\.weight is I64; only F16"),
        ({f"{PREFIX}.lora_magnitude_vector": torch.ones(64)}, r"lora_magnitude_vector is DoRA's"),
        ({f"{PREFIX}.lora_B.bias": torch.ones(64)}, r"lora_B\.bias is a bias"),
        ({f"{PREFIX}.base_layer.bias": torch.ones(64)}, r"q_proj\.base_layer\.bias is a bias"),
        ({"base_model.model.model.embed_tokens.weight": torch.ones(130, 64)}, "is a whole embedding"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 128)}, "adapts an embedding"),
        ({"base_model.model.model.norm.weight": torch.ones(64)}, r"model\.norm\.weight is no factor"),
        ({f"{PREFIX}.lora_E": torch.ones(4)}, r"lora_E is no factor"),
        (
            {
                "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight": torch.ones(4, 64),
                "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight": torch.ones(64, 4),
            },
            r"changes model\.layers\.2\.self_attn\.q_proj, which is no linear that adapters can change.*q_proj",
        ),
        (
            {
                "model.layers.1.self_attn.q_proj.lora_A.weight": torch.ones(4, 64),
                "model.layers.1.self_attn.q_proj.lora_B.weight": torch.ones(64, 4),
            },
            "exists twice, with and without PEFT's prefix",
        ),
        (
            {
                "layers.1.self_attn.q_proj.lora_A.weight": torch.ones(4, 64),
                "layers.1.self_attn.q_proj.lora_B.weight": torch.ones(64, 4),
            },
            "change the same linear",
        ),
    ],
)
def test_a_tensor_is_refused_by_its_name(
    changes: dict[str, Tensor | None], message: str, adapter: Path, read: Callable[[], object]
) -> None:
    change_tensors(adapter, changes)
    with pytest.raises(AdapterError, match=message):
        read()


def test_named_modules_without_factors_stay_as_they_are_and_are_logged(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_checkpoint("qwen3-bias-untied", tmp_path / "base")
    change(adapter, target_modules=["q_proj", "v_proj", "k_proj"], init_lora_weights=True)
    change_tensors(adapter, {f"{PREFIX}.lora_A.weight": None, f"{PREFIX}.lora_B.weight": None})
    with quiet(), warnings.catch_warnings(action="ignore", category=UserWarning):  # PEFT warns of the same
        merged = PeftModel.from_pretrained(copy.deepcopy(base), adapter).merge_and_unload()
    with caplog.at_level("WARNING", "aengine"):
        assert_mixed(load(tmp_path / "base", [adapter]), [base, merged])
    [line] = [record.getMessage() for record in caplog.records if record.name == "aengine"]
    assert "names 3 linears without factors in the file, such as model.layers.0.self_attn.k_proj" in line


def test_files_that_are_no_adapter(adapter: Path, read: Callable[[], object]) -> None:
    sound = (adapter / FILE).read_bytes()
    (adapter / FILE).write_bytes(sound[:-4])
    with pytest.raises(AdapterError, match="truncated"):
        read()
    (adapter / FILE).unlink()
    with pytest.raises(AdapterError, match="no such file"):
        read()
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle.*safe_serialization=True"):
        read()
    (adapter / SETTINGS).write_text('{"r": ' + "[" * 100_000)
    with pytest.raises(AdapterError, match="not valid JSON"):
        read()
    (adapter / SETTINGS).unlink()
    with pytest.raises(AdapterError, match=r"no adapter_config\.json in this folder"):
        read()


def test_what_peft_itself_writes_for_other_methods(
    base: tuple[PreTrainedModel, ModelConfig], adapter: Path, read: Callable[[], object]
) -> None:
    for config, message in (
        (LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True), "use_dora"),
        (LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="all"), "is a bias"),
        (LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]), "adapts an embedding|whole embedding"),
        (LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), "modules_to_save"),
        (LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1]), "trainable_token_indices"),
        (LoHaConfig(r=4, target_modules=["q_proj"]), "peft_type 'LOHA'"),
    ):
        with quiet():
            get_peft_model(copy.deepcopy(base[0]), config).save_pretrained(adapter)
        with pytest.raises(AdapterError, match=message):
            read()


def test_room_is_made_for_what_is_named_and_where_others_may_come_for_all_linears_of_layers(
    base: tuple[PreTrainedModel, ModelConfig], adapter: Path, tmp_path: Path
) -> None:
    linears = adaptable_linears(base[1])

    def reads(room: LoraRoom, folder: Path) -> bool:
        try:
            read_adapter(folder, linears, room, torch.float32)
        except AdapterError as error:
            if "for which no memory is kept: name it" not in str(error):
                raise
            return False
        return True

    write_adapter(base[0], tmp_path / "head", target_modules=["lm_head"])
    write_adapter(base[0], tmp_path / "mlp", target_modules=["down_proj"])
    small = room_for(base[1], [adapter])
    assert small.kinds == ("self_attn.q_proj",)
    assert [reads(small, folder) for folder in (adapter, tmp_path / "mlp", tmp_path / "head")] == [True, False, False]
    large = room_for(base[1], [adapter], loading=True)
    assert [reads(large, folder) for folder in (adapter, tmp_path / "mlp", tmp_path / "head")] == [True, True, False]
    all_of_them = room_for(base[1], [adapter, tmp_path / "head"], loading=True)
    assert [reads(all_of_them, folder) for folder in (tmp_path / "mlp", tmp_path / "head")] == [True, True]


def test_names_of_the_bare_decoder_are_the_same(
    base: tuple[PreTrainedModel, ModelConfig], adapter: Path, read: Callable[[], Linears]
) -> None:
    tensors = load_file(adapter / FILE)
    save_file({name.replace(".model.model.", ".model."): one for name, one in tensors.items()}, adapter / FILE)
    read()
