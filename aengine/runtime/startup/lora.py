"""The room that a start-up makes for adapters, and the places that its runtime has for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.survey import survey
from aengine.model.spec import ExpertsSpec
from aengine.runtime.adapters import Filler, RankedPlaces


def make_room(config: EngineConfig, model: ModelConfig, experts: bool) -> ModelConfig:
    """The model with room for the adapters that `config` names, whose folders are looked into, and for as many others
    as it asks for. experts: whether the device can compute with adapters of experts. Raises `AdapterError`.
    """
    places = config.lora_places()
    if not places:
        return model
    folders = {name: Path(folder) for name, folder in config.lora.items()}
    linears = adaptable_linears(model)
    return model.with_room(survey(folders, linears, places, config.max_lora_rank, config.lora_loading, experts))


def adapts_experts(model: ModelConfig) -> bool:
    """Whether a GPU has kernels for adapters of the model's experts: of floats, without biases or clamped gates."""
    experts = [layer.ffn for layer in model.layers if isinstance(layer.ffn, ExpertsSpec)]
    return not (model.fp8 or model.int4 or any(spec.biases or spec.clamp for spec in experts))


def places_of(decoders: Sequence[Decoder], fillers: Sequence[Filler], base: Path | None) -> RankedPlaces | None:
    """The places of a loaded model; None where it has no room. base: the folder of its weights; None: random ones."""
    memories = [decoder.adapters for decoder in decoders if decoder.adapters is not None]
    return RankedPlaces(memories, fillers, decoders[0].dtype, base) if memories else None
