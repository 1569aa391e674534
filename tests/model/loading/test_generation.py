"""generation_config.json: the tokens that end an answer, and defaults of sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aengine.errors import CheckpointError
from aengine.model.config import ModelConfig
from aengine.model.loading.generation import GenerationDefaults
from tests.model.test_config import QWEN3


def read(
    folder: Path, generation: dict[str, object] | None, config: dict[str, object] | None = None
) -> GenerationDefaults:
    (folder / "config.json").write_text(json.dumps({**QWEN3, **(config or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return GenerationDefaults.from_folder(folder, ModelConfig.from_folder(folder))


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [9, 7]}, {"eos_token_id": 3}, (9, 7)),
        ({"eos_token_id": 9}, {}, (9,)),
        ({}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {}, ()),
    ],
)
def test_eos_ids(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], eos: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation, config).eos_token_ids == eos


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        (None, {}, (5,)),
        ({"eos_token_id": None}, {}, (5,)),
        ({"eos_token_id": 9}, {}, (9, 5)),
        ({"eos_token_id": [5, 9]}, {}, (5, 9)),
        (None, {"eos_token_id": 3}, (3, 5)),
    ],
)
def test_what_the_tokenizer_names_ends_it_as_well(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], eos: tuple[int, ...]
) -> None:
    read(tmp_path, generation, config)
    model = ModelConfig.from_folder(tmp_path)
    assert GenerationDefaults.from_folder(tmp_path, model, 5).eos_token_ids == eos
    unknown = GenerationDefaults.from_folder(tmp_path, model, model.vocab_size)  # no such token
    assert unknown.eos_token_ids == read(tmp_path, generation, config).eos_token_ids


def test_sampling_values_are_taken_over(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert (
        read(tmp_path, {"do_sample": True, **values, "max_length": 20, "transformers_version": "5"}).sampling == values
    )


def test_without_a_file_or_values_nothing_is_set(tmp_path: Path) -> None:
    assert read(tmp_path, None).sampling == {}
    assert read(tmp_path, {"top_k": None, "temperature": None}).sampling == {}


def test_explicitly_no_sampling_is_greedy(tmp_path: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    assert read(tmp_path, generation).sampling == {"temperature": 0.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("eos_token_id", 100),
        ("eos_token_id", [-1]),
        ("do_sample", "no"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}"):
        read(tmp_path, {key: value})
