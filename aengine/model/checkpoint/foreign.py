"""Refuses checkpoints in layouts other than Hugging Face's. The error names the layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.model.checkpoint.safetensors import INDEX, SINGLE, read_format

_INSTEAD = (
    "use the repository in Hugging Face format (config.json, tokenizer.json, model*.safetensors) that it was made from"
)
_FORMS = {  # by patterns of file names
    "*.gguf": "llama.cpp's GGUF",
    "consolidated*.safetensors": "Mistral's own layout",
    "consolidated*.pth": "Meta's own layout",
    "weights*.npz": "MLX's",
    "*.onnx": "ONNX",
    "params.json": "its publisher's own layout",
}


def refuse_file(path: Path, knob: str = "model") -> None:
    """Raise `UnsupportedModelError` if the file is in a known format that is not supported.

    knob: named in the error.
    """
    form = next((form for pattern, form in _FORMS.items() if path.match(pattern)), None)
    if form is not None:
        raise UnsupportedModelError(f"{knob}: {path} is in {form}, which is not read; {_INSTEAD}")


def refuse_layout(folder: Path, knob: str = "model") -> None:
    """Raise `UnsupportedModelError` if a folder holds a model in a known layout, and none in a supported one.

    A folder without any weights is accepted, because the model may get random weights. knob: named in the error.
    """
    if any((folder / name).exists() for name in (SINGLE, INDEX)):
        return
    for pattern, form in _FORMS.items():
        if found := min(folder.glob(pattern), default=None):
            raise UnsupportedModelError(f"{knob}: {folder} holds {found.name}, {form}, which is not read; {_INSTEAD}")


def refuse_mlx(values: Mapping[str, object], source: str) -> None:
    """Raise `UnsupportedModelError` if mlx-lm wrote the config.json of quantised weights."""
    section = values.get("quantization")
    if isinstance(section, dict) and "bits" in section:
        raise UnsupportedModelError(
            f"{source}: quantization: the weights are quantised for MLX, which is not read; {_INSTEAD}, or one of its "
            f"FP8, AWQ or GPTQ editions"
        )


def with_mlx_hint(folder: Path, error: WeightsError) -> WeightsError:
    """Return the error. If MLX wrote the files, its text says so, because some of MLX's layouts differ."""
    files = folder.glob("*.safetensors")
    if any(read_format(path) == "mlx" for path in files):
        return WeightsError(f"{error}; MLX wrote these files: {_INSTEAD}")
    return error
