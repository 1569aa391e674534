"""Reads adapter_config.json. A setting that cannot be applied exactly is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aengine.errors import AdapterError, CheckpointError
from aengine.model.fields import Fields, read_json_object, shown
from aengine.model.lora.patterns import ModuleNames, Patterns
from aengine.model.lora.room import RANKS

SETTINGS = "adapter_config.json"
MAX_ALPHA = 1e6
MERGE = "merge it into the base model (PEFT's merge_and_unload) and serve that"

# Fields that do not change the results of a trained adapter.
_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
        "velora_config",
    )
)  # fmt: skip
_READ = frozenset(
    (
        "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
    )
)  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA scales the whole weight by its norm",
    "use_qalora": "QA-LoRA averages groups of inputs",
    "lora_bias": "biases of lora_B are not added",
    "modules_to_save": "whole modules are stored beside the factors",
    "trainable_token_indices": "embeddings of single tokens are replaced",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "it is routed by its inputs",
    "ensure_weight_tying": "the adapter of the output matrix would change the embedding",
    "kasa_config": "it changes the base weights",
    "monteclora_config": "it draws from a distribution",
}
# Initialisations that leave the base weights as they are.
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the factors in a file are applied."""

    source: str
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Patterns[int]
    alphas: Patterns[float]
    targets: ModuleNames
    peft_version: tuple[int, ...] | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Settings:
        """Read the folder's adapter_config.json. Raises `AdapterError`, naming the field."""
        path = folder / SETTINGS
        try:
            values = read_json_object(path)
            return cls._read(Fields(values, str(path)), values)
        except AdapterError:
            raise
        except CheckpointError as error:
            raise AdapterError(str(error)) from None

    @classmethod
    def _read(cls, fields: Fields, values: Mapping[str, object]) -> Settings:
        kind = fields.text("peft_type")
        if kind != "LORA":
            raise _refused(fields, "peft_type", f"{shown(kind)} is not supported, only LORA; {MERGE}")
        for name, value in values.items():
            if name in _REFUSED and _is_set(value):
                raise _refused(fields, name, f"is not supported: {_REFUSED[name]}; {MERGE}")
            if name not in _READ | _WITHOUT_EFFECT | _REFUSED.keys() and _is_set(value):
                raise _refused(fields, name[:60], f"is {shown(value)}, and is not known here; {MERGE}")
        _check_initialisation(fields, values.get("init_lora_weights", True))
        _check_task(fields, values.get("task_type"))
        bias = fields.text("bias", "none")
        if bias not in ("none", "all", "lora_only"):  # if biases were trained, the file holds them
            raise _refused(fields, "bias", f"is {shown(bias)}, which PEFT does not write")
        return cls(
            source=fields.source,
            rank=fields.integer("r", 1, RANKS[-1]),
            alpha=fields.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, 8),
            rank_stabilised=fields.flag("use_rslora", default=False),
            ranks=Patterns.read(fields, "rank_pattern", lambda section, key: section.integer(key, 1, RANKS[-1])),
            alphas=Patterns.read(
                fields, "alpha_pattern", lambda section, key: section.number(key, -MAX_ALPHA, MAX_ALPHA)
            ),
            targets=ModuleNames.read(fields),
            peft_version=_version(values.get("peft_version")),
        )

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of b @ a for a module. rank: of the factors in the file.

        Raises `AdapterError` if the settings name another rank, or if alpha depends on a regular expression.
        """
        if self.ranks.readable and rank != (configured := self.ranks.value_for(module, self.rank)):
            raise AdapterError(
                f"{self.source}: r (or rank_pattern) makes the rank of {module} {configured}, its factors have {rank}"
            )
        if not self.alphas.readable:
            raise AdapterError(
                f"{self.source}: alpha_pattern holds a regular expression, only names of modules are supported; write "
                f"the names instead"
            )
        alpha = self.alphas.value_for(module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def _refused(fields: Fields, key: str, why: str) -> AdapterError:
    return AdapterError(str(fields.fail(key, why)))


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _check_initialisation(fields: Fields, value: object) -> None:
    """Refuse initialisations that change the base weights."""
    if not any(value is one or (isinstance(one, str) and value == one) for one in _HARMLESS_INITS):
        raise _refused(
            fields,
            "init_lora_weights",
            f"is {shown(value)}: such adapters belong to changed base weights; save it with PEFT's "
            f"path_initial_model_for_weight_conversion",
        )


def _check_task(fields: Fields, value: object) -> None:
    if value not in _TASKS:
        raise _refused(fields, "task_type", f"is {shown(value)}; only adapters of causal language models are served")


def _version(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, str):
        return None
    digits = [part for part in value.split(".")[:2] if part.isdecimal() and len(part) < 6]
    return tuple(map(int, digits)) if len(digits) == 2 else None
