"""Images on the command line: files that become parts of messages."""

from __future__ import annotations

import argparse
import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aengine.cli.errors import CommandError, UsageError
from aengine.cli.knobs import read_knobs
from aengine.cli.model import Model
from aengine.config import EngineConfig
from aengine.errors import InvalidRequestError

Part = dict[str, Any]  # of a message's content


def add_images(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the flag `--image`. purpose: what becomes of the images, for the help."""
    text = f"an image {purpose}: PNG, JPEG, WebP or GIF; may be repeated"
    parser.add_argument("--image", dest="image_files", action="append", default=[], metavar="FILE", help=text)


def read_images(args: argparse.Namespace) -> list[Part]:
    """Return the images of `--image` as parts of a message. Raises `UsageError`."""
    if args.image_files and args.url is None and read_knobs(args, EngineConfig).images == "off":
        raise UsageError("--image: the knob images is off, so the model takes no images; leave one of them out")
    return [read_image(file, "--image") for file in args.image_files]


def read_image(file: str, name: str) -> Part:
    """Return an image file as a part of a message. Only its header is checked.

    Raises `UsageError`, whose text begins with `name`.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"{name}: there is no file {file!r}; check the path")
    try:
        data = path.read_bytes()
        _read_format(data)
    except OSError as error:
        raise UsageError(f"{name}: {file!r} cannot be read: {error.strerror}") from None
    except InvalidRequestError as error:
        raise UsageError(f"{name}: {file!r} {str(error).removeprefix('image: ')}") from None
    return {"type": "image", "image": data}


def _read_format(data: bytes) -> str:
    from aengine.images.header import read_header
    from aengine.images.pixels import MAX_PIXELS

    return read_header(data, MAX_PIXELS).format


def why_no_images(model: Model) -> str:
    """Return why a model in this process takes no images. Empty if it takes them, and for a server."""
    why: str = getattr(model, "no_images", "")
    return why


def check_config_takes_images(args: argparse.Namespace, images: list[Part]) -> None:
    """Raise `CommandError` if there are images, and the config.json of a model for this process says it takes none.

    So a large model is not loaded in vain.
    """
    if images and args.url is None:
        from aengine.engine.loaded import read_model_config
        from aengine.model.loading.hub import resolve_model

        config = read_knobs(args, EngineConfig)
        _check(read_model_config(config, resolve_model(config.model, config.revision)).no_images)


def check_takes_images(model: Model, images: list[Part]) -> None:
    """Raise `CommandError` if there are images, and the loaded model takes none."""
    if images:
        _check(why_no_images(model))


def _check(why: str) -> None:
    if why:
        raise CommandError(f"--image: the model takes no images: {why}; leave it out, or choose another model")


def user_message(text: str, images: Sequence[Part]) -> dict[str, Any]:
    """Return a message of the user, with images before its text."""
    return {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}


def written_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose images are data URLs, as in OpenAI's API, so that it can be written as JSON."""
    return _with_parts(message, _write_part)


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a written message with the bytes of its images. Raises `UsageError` if one is damaged."""
    return _with_parts(message, _read_part)


def _with_parts(message: dict[str, Any], change: Any) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [change(part) for part in content]} if isinstance(content, list) else message


def _write_part(part: Any) -> Any:
    match part:
        case {"type": "image", "image": bytes(data)}:
            url = f"data:image/{_read_format(data).lower()};base64,{b64encode(data).decode()}"
            return {"type": "image_url", "image_url": {"url": url}}
    return part


def _read_part(part: Any) -> Any:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
            try:
                data = b64decode(url.partition(";base64,")[2], validate=True)
                _read_format(data)
            except (binascii.Error, InvalidRequestError) as error:
                raise UsageError(f"an image of the conversation cannot be read: {error}") from None
            return {"type": "image", "image": data}
    return part
