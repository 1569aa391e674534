"""Decides at start-up whether the tower for images is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.towers.build import count_weights
from aengine.runtime.weights import find_defect

log = logging.getLogger("aengine")


def choose_images(config: EngineConfig, model: ModelConfig, files: Path, room: int) -> ModelConfig:
    """Return the model with its tower if it can take images, else with the reason why it takes none.

    The start-up log has one line about it, if the checkpoint has a tower. Reads headers of weights.

    files: the folder of the model.
    room: how many tokens of an image a step can hold.
    """
    if model.images is None:
        return model
    if why := _why_none(config, model, files, room):
        log.info("images: off, because %s", why)
        return replace(model, no_images=why)
    log.info("images: a tower of %d million weights", round(count_weights(model.images) / 1e6))
    return model.with_images()


def whole_image(config: EngineConfig, model: ModelConfig) -> int:
    """Return how many tokens of an image a step must hold at once. 0: images may be split, or there are none."""
    if config.images == "off" or model.images is None or model.images.splittable:
        return 0
    return model.images.rule.most_tokens


def _why_none(config: EngineConfig, model: ModelConfig, files: Path, room: int) -> str:
    if config.images == "off":
        return "the knob images is off"
    if model.head != "vocabulary":
        return "the model generates no text"
    if room < (whole := whole_image(config, model)):
        return (
            f"a step must hold the {whole} tokens of an image beside a token of each other row, and has room for "
            f"{room}; raise max_step_tokens or lower max_num_seqs"
        )
    plain = model.with_lora(None)
    return find_defect(config, files, plain.with_images(), plain)
