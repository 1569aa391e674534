"""Reserves memory for adapters at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.survey import survey
from aengine.runtime.adapters import AdapterPlaces, Filler


def reserve_adapters(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model's configuration with memory for adapters, or unchanged if `config` allows no adapters.

    Reads the ranks and linears of the configured adapters from their folders.

    Raises: AdapterError.
    """
    places = config.lora_places()
    if not places:
        return model
    folders = {name: Path(folder) for name, folder in config.lora.items()}
    linears = adaptable_linears(model)
    return model.with_lora(survey(folders, linears, places, config.max_lora_rank, config.lora_loading))


def make_adapter_places(
    decoders: Sequence[Decoder], fillers: Sequence[Filler], base: Path | None
) -> AdapterPlaces | None:
    """Return the adapter places of a loaded model, or None if it has no memory for adapters.

    base: the folder of the model's weights. None: the weights are random.
    """
    memories = [decoder.adapters for decoder in decoders if decoder.adapters is not None]
    return AdapterPlaces(memories, fillers, decoders[0].dtype, base) if memories else None
