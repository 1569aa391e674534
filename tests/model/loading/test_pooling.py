"""Files about embeddings and classes are read, and refused if they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.loading.pooling import PoolingConfig, without_head

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}


def read(folder: Path, modules: object = None, files: dict[str, object] | None = None, **config: Any) -> PoolingConfig:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return PoolingConfig.from_folder(folder, ModelConfig.from_folder(folder))


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"name": "0", "path": path, "type": f"sentence_transformers.base.modules.{kind.lower()}.{kind}"}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_every_family_has_three_heads(family: str) -> None:
    from aengine.model.architecture import find_architecture
    from aengine.model.fields import Fields

    for ending, head in (("ForCausalLM", "vocabulary"), ("Model", "none"), ("ForSequenceClassification", "classes")):
        found = find_architecture(Fields({"architectures": [f"{family}{ending}"]}, "here"))
        assert found == (f"{family}{ending}", f"{family}ForCausalLM", head, None)


@pytest.mark.parametrize("name", ["BertModel", "Model", "ForCausalLM", "Qwen3ForTokenClassification", "GPT2Model", ""])
def test_others_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture"):
        read(tmp_path, architectures=[name])


def test_without_further_files_it_is_the_last_token_of_length_1(tmp_path: Path) -> None:
    assert read(tmp_path) == PoolingConfig(kind="last", normalize=True)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 2),  # which transformers does not write
        ({"id2label": {"0": "a"}}, 1),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"num_labels": 5}, 5),
    ],
)
def test_labels_are_counted_as_transformers_writes_them(tmp_path: Path, fields: dict[str, Any], count: int) -> None:
    found = read(tmp_path, architectures=["Qwen3ForSequenceClassification"], **fields)
    assert len(found.labels) == count
    assert found.independent == (count == 1)
    model = ModelConfig.from_folder(tmp_path)
    assert (model.labels, model.head, model.tie_word_embeddings) == (count, "classes", True)
    assert model.end_parameters == (128 + count) * 64


@pytest.mark.parametrize(
    "fields",
    [
        {"id2label": {}},
        {"id2label": []},
        {"id2label": {"0": 5}},
        {"num_labels": 0},
        {"num_labels": 2**40},
        {"num_labels": True},
        {"problem_type": 5},
        {"matryoshka_dimensions": []},
        {"matryoshka_dimensions": [65]},
        {"matryoshka_dimensions": [0]},
        {"matryoshka_dimensions": ["8"]},
        {"is_matryoshka": "yes"},
        {"sentence_transformers": []},
        {"sentence_transformers": {"activation_fn": 3}},
    ],
)
def test_values_that_no_model_has_are_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, architectures=["Qwen3ForSequenceClassification"], **fields)
    named = [*fields, *(key for value in fields.values() if isinstance(value, dict) for key in value)]
    assert any(key in str(error.value) for key in named)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [],
        [module("Transformer")] * 17,
        ["Transformer"],
        [{"path": ""}],
        [module("Transformer"), module("Pooling", "../elsewhere")],
        [module("Transformer"), module("Pooling", "/etc")],
        [module("Transformer"), module("Pooling", "a/b")],
        [module("Transformer"), module("Pooling", "..")],
        [module("Transformer"), module("Pooling", "1_Pooling")],  # which is not there
    ],
)
def test_a_list_of_modules_that_cannot_be_used_is_named(tmp_path: Path, modules: object) -> None:
    with pytest.raises(CheckpointError, match=r"modules\.json|1_Pooling"):
        read(tmp_path, modules)


def test_the_tokens_that_a_reranker_answers_with(tmp_path: Path) -> None:
    modules = [module("Transformer"), module("LogitScore", "1_LogitScore")]
    files: dict[str, object] = {"1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 3}}
    assert read(tmp_path, modules, files).yes_no == (7, 3)
    files = {"1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": None}}
    assert read(tmp_path, modules, files).yes_no is None
    files = {"1_LogitScore/config.json": {"true_token_id": 128, "false_token_id": 3}}
    with pytest.raises(CheckpointError, match="true_token_id"):
        read(tmp_path, modules, files)


def test_a_head_is_only_left_out_where_the_checkpoint_embeds(tmp_path: Path) -> None:
    read(tmp_path, tie_word_embeddings=False)
    model = ModelConfig.from_folder(tmp_path)
    assert without_head(tmp_path, model) is model  # nothing is read
