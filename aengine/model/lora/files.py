"""The tensors of an adapter's file, each with the module that it changes; headers are checked before any is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aengine.errors import AdapterError, WeightsError
from aengine.model.checkpoint.safetensors import TensorEntry, read_header
from aengine.model.groups import DTYPES, FLOATS
from aengine.model.lora.settings import MERGE

WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 16 * 2**20  # parsed while others are served; of factors of 12,000 experts, each by itself
_PICKLED = "adapter_model.bin"
_COPY = re.compile(
    r"(base_model\.model\.)?(language_model\.)?lm_head\.base_layer\.weight"
)  # PEFT's default where it is adapted
_PREFIX = re.compile(r"(base_model\.model\.)?")
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_KINDS = (
    (re.compile(r".*lora_magnitude_vector.*"), "is DoRA's"),
    (re.compile(r".*lora_embedding_[AB].*"), "adapts an embedding, which is not supported"),
    (
        re.compile(r".*\bembed_tokens\b.*|.*\blm_head\.(base_layer\.)?weight"),
        "is a whole embedding or output matrix (save_embedding_layers=False leaves copies of the base's out)",
    ),
    (re.compile(r".*\.bias"), "is a bias"),
)


@dataclass(frozen=True, slots=True)
class Factor:
    """One of the two factors of a module, in its file."""

    path: Path
    name: str  # as the file spells it
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self) -> Tensor:
        """In float32, or float64 if it is stored so. Raises `AdapterError`: the file changed, or holds no numbers."""
        values = torch.empty(self.entry.shape, dtype=DTYPES[self.entry.dtype])
        missing = values.view(torch.uint8).numpy().reshape(-1).data if values.numel() else memoryview(b"")
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.entry.start)
                while missing:
                    count = file.readinto(missing)
                    if not count:
                        raise AdapterError(f"{self.path}: ends within {self.name}; it changed while it was read")
                    missing = missing[count:]
        except OSError as error:
            raise AdapterError(f"{self.path}: {error}") from error
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        # What is no number stays so in a sum, which is quicker than to look at each; but large numbers overflow there.
        if not bool(wide.sum().isfinite()) and not bool(wide.isfinite().all()):
            raise AdapterError(f"{self.path}: {self.name} holds NaN or infinity; the adapter is damaged")
        return wide


@dataclass(frozen=True, slots=True)
class Pair:
    """Both factors of a module: what is added to its weight is b a, times a scale."""

    module: str  # as the file spells it, without the prefix of PEFT's own classes
    a: Factor  # [rank, inputs]
    b: Factor  # [outputs, rank]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds."""

    pairs: dict[str, Pair]  # by the modules that they change
    copy: tuple[Path, str, TensorEntry] | None  # the base's output matrix once more; its file, name and place


def read_contents(folder: Path) -> Contents:
    """What a folder's file holds. Reads the header alone.

    Raises `AdapterError` for a tensor that is no factor, by its name, and for a damaged file.
    """
    path = folder / WEIGHTS
    if not path.exists() and (folder / _PICKLED).exists():
        raise AdapterError(
            f"{folder}: {_PICKLED} is a pickle, which can run code when loaded and is never read here; save the "
            f"adapter with safe_serialization=True"
        )
    try:
        header = read_header(path, MAX_HEADER_BYTES)
    except WeightsError as error:
        raise AdapterError(str(error)) from None
    found: dict[str, dict[str, Factor]] = {}
    copy = None
    for name, entry in header.items():
        factor = _FACTOR.fullmatch(name) if len(name) < 1000 else None
        if factor is None and len(name) < 1000 and _COPY.fullmatch(name) and copy is None:
            copy = (path, name, entry)
            continue
        if factor is None:
            raise AdapterError(f"{path}: {name[:200]} {_what(name)}; {MERGE}")
        if entry.dtype not in FLOATS:
            raise AdapterError(f"{path}: {name} is {entry.dtype}; only {', '.join(FLOATS)} are supported")
        module = _PREFIX.sub("", factor[1], count=1)
        if factor[2] in found.setdefault(module, {}):
            raise AdapterError(f"{path}: {name} is there twice, with and without PEFT's prefix")
        found[module][factor[2]] = Factor(path, name, entry)
    if not found:
        raise AdapterError(f"{path}: holds no factors (lora_A, lora_B)")
    if copy is not None and not found.keys() & {"lm_head", "language_model.lm_head"}:
        raise AdapterError(f"{path}: {copy[1]} is there, and no factors of lm_head; {MERGE}")
    return Contents({module: _pair(path, module, factors) for module, factors in found.items()}, copy)


def _pair(path: Path, module: str, factors: Mapping[str, Factor]) -> Pair:
    for kind in "AB":
        if kind not in factors:
            raise AdapterError(f"{path}: {module} lacks lora_{kind}.weight")
    pair = Pair(module, factors["A"], factors["B"])
    for factor in (pair.a, pair.b):
        if len(factor.shape) != 2 or 0 in factor.shape:
            raise AdapterError(f"{path}: {factor.name} has shape {list(factor.shape)}, which no factor has")
    return pair


def _what(name: str) -> str:
    return next((what for kind, what in _KINDS if kind.fullmatch(name[:1000])), "is no factor (lora_A, lora_B)")
