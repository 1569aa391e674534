"""A key that config.json leaves out, or has as null, means what transformers makes of it, or is refused as missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aengine.errors import AengineError
from aengine.model.config import ModelConfig
from tests.model.cases import CASES
from tests.model.checkpoints import SHAPE

_TEXT = "text_config"
_UNREAD = ("architectures", "model_type", "transformers_version", "vision_config", _TEXT, "dtype")
# Keys outside of text_config whose defaults differ from published files, which leave them out.
_OUTSIDE = ("tie_word_embeddings",)
# Qwen2.5-VL has the row of Qwen2, whose class has other defaults. Published files have both keys.
_SHARED_ROW = {"qwen2-5-vl": ("rms_norm_eps", "rope_parameters")}
# transformers then takes the window of layers from another key, which such files do not have.
_BESIDE = {"smollm3-window": ("layer_types",)}
_NEVER_NULL = ("rope_parameters",)  # a key of newer files, which write it
_DRAFTS = "num_nextn_predict_layers"  # its default only names tensors that are not read


def _as_written(config: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def _changed(values: dict[str, Any], case: str, null: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key, and the values without it or with null. If there is a language model inside, its keys, too."""
    allowed = (*_UNREAD, *_SHARED_ROW.get(case, ()), *_BESIDE.get(case, ()), _DRAFTS, *(_NEVER_NULL if null else ()))
    for key in set(values).difference(allowed, _OUTSIDE if _TEXT in values else ()):
        yield key, _without(values, key, null)
    for key in set(values.get(_TEXT, ())).difference(allowed):
        yield f"{_TEXT}.{key}", values | {_TEXT: _without(values[_TEXT], key, null)}


def _without(values: dict[str, Any], key: str, null: bool) -> dict[str, Any]:
    return values | {key: None} if null else {name: value for name, value in values.items() if name != key}


def _read(values: dict[str, Any], folder: Path) -> ModelConfig | str:
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return ModelConfig.from_folder(folder)
    except AengineError as error:
        return str(error)


@pytest.mark.parametrize("null", [False, True], ids=["left out", "null"])
@pytest.mark.parametrize("case", CASES)
def test_a_missing_key_has_the_default_of_transformers(case: str, null: bool, tmp_path: Path) -> None:
    model_type, make, changes = CASES[case]
    config = make(**{**SHAPE, **changes})
    names = {"architectures": [model_type.__name__]}
    for key, values in _changed(_as_written(config), case, null):
        try:
            completed = _as_written(type(config)(**json.loads(json.dumps(values))))
        except Exception:  # noqa: BLE001 - transformers cannot do without it
            continue
        found, expected = _read(values | names, tmp_path), _read(completed | names, tmp_path)
        if isinstance(found, str) or isinstance(expected, str):
            # The defaults of other keys may not fit to the sizes of a small model, such as ids of tokens.
            assert isinstance(found, str) or "token" in str(expected), (key, expected)
            continue
        for name in ("layers", "ends", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
            assert getattr(found, name) == getattr(expected, name), (key, name)
