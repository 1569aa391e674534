"""Decides at start-up whether the tower for images is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from aengine.attention.torch_backend import TorchAttention
from aengine.config import EngineConfig
from aengine.errors import AengineError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import open_checkpoint
from aengine.model.towers.build import count_weights

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
    return _defect(config, model, files)


def _defect(config: EngineConfig, model: ModelConfig, files: Path) -> str:
    """Return why the tower cannot be loaded. Empty if it can, or if the model cannot be loaded either."""
    if config.load_format != "auto":
        return ""
    plain = model.with_lora(None)

    def defect(one: ModelConfig) -> str:
        try:
            open_checkpoint(files, Decoder(one, TorchKernels(), TorchAttention()))
        except AengineError as error:
            return str(error)
        return ""

    found = defect(plain.with_images())
    return "" if found and defect(plain) else found
