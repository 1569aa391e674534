"""In which order a start-up looks at things: what is cheap to check comes before what takes a minute."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aengine.config import EngineConfig, configure
from aengine.engine import loaded
from aengine.errors import AengineError, CheckpointError
from aengine.model.config import ModelConfig
from aengine.model.hub import resolve_model
from aengine.runtime.startup.ready import Runtime


class Started(Exception):
    """Weights would be read now."""


def start(config: EngineConfig, folder: Path, model: ModelConfig) -> Runtime:
    raise Started


def load(folder: Path) -> None:
    loaded.load(configure(EngineConfig, {}, model=str(folder), device="cpu"), start)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(resolve_model(None, None), tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_sound_checkpoint_gets_as_far_as_its_weights(checkpoint: Path) -> None:
    with pytest.raises(Started):
        load(checkpoint)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{}"),
        ("tokenizer.json", "no JSON"),
        ("tokenizer.json", "{}"),
        ("generation_config.json", '{"eos_token_id": -1}'),
    ],
)
def test_files_are_read_before_weights(file: str, text: str, checkpoint: Path) -> None:
    (checkpoint / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        load(checkpoint)


def test_the_grammar_library_is_tried_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AengineError("the library does not take this vocabulary")

    monkeypatch.setattr(loaded, "Grammars", broken)
    with pytest.raises(AengineError, match="vocabulary"):
        load(checkpoint)


def test_its_threads_end_where_the_weights_cannot_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(loaded.Grammars, "close", lambda grammars: closed.append(grammars))
    with pytest.raises(Started):
        load(checkpoint)
    assert len(closed) == 1


def test_config_json_is_parsed_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = ModelConfig.from_folder
    monkeypatch.setattr(ModelConfig, "from_folder", lambda folder: read.append(folder) or real(folder))
    with pytest.raises(Started):
        load(checkpoint)
    assert read == [checkpoint]
