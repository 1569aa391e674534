"""Reads how a model takes images from config.json and from the files of its processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.fields import Fields, read_json_object
from aengine.model.images.spec import GridRope, ImageSpec, PixelValues
from aengine.model.images.tower_specs import TowerActivation

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
MAX_SIDE = 2**15  # of an image in pixels
MAX_LAYERS = 256
MAX_WIDTH = 2**16
_MAX_PATCH = 256
_ACTIVATIONS: dict[str, TowerActivation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The parts of a checkpoint's files that concern images."""

    config: Fields  # config.json
    vision: Fields  # its vision_config
    text: Fields  # its text_config
    images: Fields  # of the image processor
    processor: Fields  # of the processor around it; empty if there is no such file

    @property
    def hidden(self) -> int:
        """The hidden size of the decoder."""
        return self.text.integer("hidden_size", 1, MAX_WIDTH)


ImageReader = Callable[[ImageFiles], ImageSpec]


def read_image_spec(folder: Path, values: Mapping[str, object], reader: ImageReader) -> ImageSpec | str:
    """Return how the model in a folder takes images, or why it takes none. values: of config.json.

    The answer never prevents that the model serves text.
    """
    try:
        return reader(_files(folder, values))
    except CheckpointError as error:
        return str(error)


def _files(folder: Path, values: Mapping[str, object]) -> ImageFiles:
    config = Fields(values, str(folder / "config.json"))
    vision, text = config.section("vision_config"), config.section("text_config")
    if vision is None or text is None:
        raise CheckpointError(f"{config.source}: has no vision_config")
    processor = Fields({}, str(folder / PROCESSOR))
    if (folder / PROCESSOR).exists():
        processor = Fields(read_json_object(folder / PROCESSOR), processor.source)
    images = processor.section("image_processor")  # is preferred, as in transformers
    if images is None:
        if not (folder / PREPROCESSOR).exists():
            raise CheckpointError(f"{folder}: neither {PREPROCESSOR} nor an image_processor in {PROCESSOR}")
        images = Fields(read_json_object(folder / PREPROCESSOR), str(folder / PREPROCESSOR))
    return ImageFiles(config, vision, text, images, processor)


def pixel_values(images: Fields, mean: tuple[float, ...], std: tuple[float, ...]) -> PixelValues:
    """Read how numbers of pixels are scaled. mean, std: the family's defaults."""
    factor = 1.0
    if images.flag("do_rescale", default=True):
        factor = images.number("rescale_factor", 1e-6, 1.0, 1 / 255)
    if not images.flag("do_normalize", default=True):
        return PixelValues(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    means = images.numbers("image_mean", 3, -10, 10) if images.present("image_mean") else mean
    stds = images.numbers("image_std", 3, 1e-3, 10) if images.present("image_std") else std
    return PixelValues(factor, (means[0], means[1], means[2]), (stds[0], stds[1], stds[2]))


def resample(images: Fields, default: int) -> int:
    """Read the number of Pillow's filter. Raises `UnsupportedModelError` if images are not resized."""
    if not images.flag("do_resize", default=True):
        raise UnsupportedModelError(f"{images.source}: do_resize is false; images of any size are not supported")
    if not images.flag("do_convert_rgb", default=True):
        raise UnsupportedModelError(f"{images.source}: do_convert_rgb is false; other colours are not supported")
    return images.integer("resample", 0, 5, default)


def side(fields: Fields, key: str, default: int | None = None) -> int:
    """Read the side of a square. It may be one number, a list of two, or an object with height and width."""
    if not fields.present(key) or fields.is_integer(key):
        return fields.integer(key, 1, _MAX_PATCH, default)
    if isinstance(dict(fields.items())[key], list):
        height, width = fields.integers(key, 2, 1, _MAX_PATCH)
    else:
        section = fields.section(key) or Fields({}, fields.source)
        height, width = (section.integer(name, 1, _MAX_PATCH) for name in ("height", "width"))
    if height != width:
        raise UnsupportedModelError(f"{fields.source}: {key} is {height} x {width}; only squares are supported")
    return height


def activation(fields: Fields, key: str, default: str) -> TowerActivation:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: {key} {name[:60]} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def three_channels(vision: Fields, key: str) -> None:
    """Raise `UnsupportedModelError` if images of the tower do not have three channels."""
    if (channels := vision.integer(key, 1, 16, 3)) != 3:
        raise UnsupportedModelError(f"{vision.source}: {key} is {channels}; only 3 are supported")


def heads(vision: Fields, key: str, hidden: int) -> int:
    """Read the number of heads. Raises `UnsupportedModelError` if heads cannot be rotated by row and column."""
    count = vision.integer(key, 1, MAX_WIDTH)
    if hidden % count or hidden // count % 4:
        raise vision.fail(key, f"({count}) must divide hidden_size ({hidden}) into heads of 4, 8, 12... elements")
    return count


def theta(vision: Fields, default: float) -> float:
    """Read the base of the rotation's frequencies."""
    section = vision.section("rope_parameters")
    if section is None:
        return vision.number("rope_theta", 1.0, 1e15, default)
    if (kind := section.text("rope_type", "axial")) not in ("axial", "default"):
        raise UnsupportedModelError(f"{section.source}: rope_type {kind[:60]} is not supported")
    return section.number("rope_theta", 1.0, 1e15, default)


def token_id(config: Fields, *keys: str) -> int:
    """Read the id of a token under the first of some keys that the file has."""
    key = next((one for one in keys if config.present(one)), keys[0])
    return config.integer(key, 0, 2**31)


def grid_rope(text: Fields, rotated: int, interleaved: bool, default: tuple[int, int, int]) -> GridRope:
    """Read how frequencies are divided among time, rows and columns. rotated: dimensions of a head."""
    section = text.section("rope_parameters") or text.section("rope_scaling") or Fields({}, text.source)
    sections = default
    if section.present("mrope_section"):
        time, rows, columns = section.integers("mrope_section", 3, 0, MAX_WIDTH)
        sections = time, rows, columns
    if sum(sections) != rotated // 2:
        raise section.fail("mrope_section", f"must add up to {rotated // 2}, is {list(sections)}")
    return GridRope(sections, interleaved)
