"""Reads a checkpoint's settings for embeddings, classes and scores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from aengine.errors import CheckpointError
from aengine.model.checkpoint.weights import stored_names
from aengine.model.config import ModelConfig
from aengine.model.fields import Fields, read_json, read_json_object, shown

MODULES = "modules.json"  # sentence-transformers' list of modules, in order
_MOST_MODULES = 16
_SUBFOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_OLD_MODE = "pooling_mode_"  # followed by a mode, in files of sentence-transformers before version 5.4
_MODES: dict[str, Literal["last", "mean"]] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
}
_HEAD = "lm_head.weight"


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint pools hidden states into embeddings, classes and scores."""

    kind: Literal["last", "mean"] = "last"
    normalize: bool = True  # whether embeddings are scaled to length 1
    dimensions: tuple[int, ...] | None = None  # allowed lengths of shortened embeddings. (): any. None: none.
    refusal: str = ""  # why embeddings are not supported. Empty: they are supported.
    labels: tuple[str, ...] = ()  # the names of classes
    independent: bool = False  # whether probabilities of classes are independent (sigmoid instead of softmax)
    raw: bool = False  # whether scores are logits instead of probabilities
    yes_no: tuple[int, int] | None = None  # token ids whose logits say that a document is relevant, or is not

    @classmethod
    def from_folder(cls, folder: Path, model: ModelConfig) -> PoolingConfig:
        """Read config.json, and the files of sentence-transformers if there are any.

        Without such files, an embedding is the last token's hidden state, scaled to length 1.

        Raises `CheckpointError`.
        """
        path = folder / "config.json"
        fields = Fields(read_json_object(path), str(path))
        config = cls(
            dimensions=_dimensions(fields, model.hidden_size),
            labels=_labels(fields, model.labels),
            independent=model.labels == 1 or fields.text("problem_type", "") == "multi_label_classification",
            raw=_activation(folder, fields).endswith(".Identity"),
        )
        return _with_modules(config, folder, model) if (folder / MODULES).exists() else config


def without_head(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the model without an output matrix if the checkpoint is for embeddings and lacks the matrix.

    Raises `WeightsError` if the files cannot be read.
    """
    if model.head != "vocabulary" or model.tie_word_embeddings or not (folder / MODULES).exists():
        return model
    if _HEAD in stored_names(folder):
        return model
    return msgspec.structs.replace(model, head="none", tie_word_embeddings=True)


def _dimensions(fields: Fields, hidden: int) -> tuple[int, ...] | None:
    if fields.present("matryoshka_dimensions"):
        found = fields.list_of_integers("matryoshka_dimensions")
        if not found or not all(1 <= one <= hidden for one in found):
            raise fields.fail("matryoshka_dimensions", f"must be numbers from 1 to {hidden}, is {shown(found)}")
        return tuple(sorted(set(found)))
    return () if fields.flag("is_matryoshka", default=False) else None


def _labels(fields: Fields, count: int) -> tuple[str, ...]:
    names = fields.section("id2label")
    return tuple(
        names.text(str(index), f"LABEL_{index}") if names is not None else f"LABEL_{index}" for index in range(count)
    )


def _activation(folder: Path, fields: Fields) -> str:
    """Return the name of the torch module that a cross-encoder applies to its logits. Empty: the default."""
    path = folder / "config_sentence_transformers.json"
    if path.exists():
        name = Fields(read_json_object(path), str(path)).text("activation_fn", "")
        if name:
            return name
    section = fields.section("sentence_transformers")
    return "" if section is None else section.text("activation_fn", "")


def _with_modules(config: PoolingConfig, folder: Path, model: ModelConfig) -> PoolingConfig:
    normalize = False
    for kind, at in _modules(folder / MODULES):
        path = folder / at / "config.json"
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                config = _with_mode(config, Fields(read_json_object(path), str(path)))
            case "Normalize":
                normalize = True
            case "LogitScore":
                config = _with_yes_no(config, Fields(read_json_object(path), str(path)), model)
            case _:
                refusal = f"its {MODULES} asks for {shown(kind)}, which is not supported"
                config = msgspec.structs.replace(config, refusal=refusal)
    return msgspec.structs.replace(config, normalize=normalize)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    entries = read_json(path)
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_MODULES:
        raise CheckpointError(f"{path}: must hold a list of 1 to {_MOST_MODULES} modules")
    found = []
    for entry in entries:
        fields = Fields(entry if isinstance(entry, dict) else {}, str(path))
        at = fields.text("path", "")
        if at and not _SUBFOLDER.fullmatch(at):
            raise fields.fail("path", f"must name a folder beside this file, is {shown(at)}")
        found.append((fields.text("type").rpartition(".")[2], at))
    return found


def _with_mode(config: PoolingConfig, fields: Fields) -> PoolingConfig:
    if fields.present("pooling_mode"):
        modes = [fields.text("pooling_mode")] if fields.is_text("pooling_mode") else fields.strings("pooling_mode")
    else:
        names = [name for name in fields.names() if name.startswith(_OLD_MODE)]
        modes = [name.removeprefix(_OLD_MODE) for name in names if fields.flag(name, default=False)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _MODES:
        refusal = f"it pools by {' and '.join(modes)[:100]}; only the last token and the mean are supported"
        return msgspec.structs.replace(config, refusal=refusal)
    return msgspec.structs.replace(config, kind=_MODES[modes[0]])


def _with_yes_no(config: PoolingConfig, fields: Fields, model: ModelConfig) -> PoolingConfig:
    ids = [fields.ids(name, model.vocab_size) for name in ("true_token_id", "false_token_id")]
    if [len(one) for one in ids] != [1, 1]:
        return config  # the logit of a single token gives no probability
    return msgspec.structs.replace(config, yes_no=(ids[0][0], ids[1][0]))
