"""Specifications of the small models that see, without their weights."""

from __future__ import annotations

from pathlib import Path

from aengine.model.families import WRAPPERS
from aengine.model.fields import read_json_object
from aengine.model.images.read import read_image_spec
from aengine.model.images.spec import ImageSpec
from tests.model.towers.checkpoints import SEEING_CASES


def write_files(case: str, folder: Path) -> None:
    """Write config.json and the files of the image processor."""
    spec = SEEING_CASES[case]
    config = spec.config(text_config=spec.text, vision_config=spec.vision, **spec.outer)
    config.architectures = [spec.model.__name__]
    config.save_pretrained(folder)
    spec.processor.save_pretrained(folder)


def read_files(case: str, folder: Path) -> ImageSpec | str:
    reader = WRAPPERS[SEEING_CASES[case].model.__name__].images
    assert reader is not None
    return read_image_spec(folder, read_json_object(folder / "config.json"), reader)


def image_spec(case: str, folder: Path) -> ImageSpec:
    write_files(case, folder)
    spec = read_files(case, folder)
    assert isinstance(spec, ImageSpec), spec
    return spec
