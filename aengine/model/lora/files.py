"""Reads the tensors of an adapter's file, and finds the module that each changes. Checks the header first."""

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
MAX_HEADER_BYTES = 16 * 2**20  # limits the time of parsing; enough for 12,000 experts that are stored one by one
_PICKLED = "adapter_model.bin"
# PEFT stores it by default if the output matrix is adapted.
_COPY = re.compile(r"(base_model\.model\.)?(language_model\.)?lm_head\.base_layer\.weight")
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
    """One of the two factors of a module. Its values are still in the file."""

    path: Path
    name: str  # as the file spells it
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self) -> Tensor:
        """Return the values in float32, or in float64 if they are stored in float64.

        Raises `AdapterError` if the file changed, or if values are not finite.
        """
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
        # The sum is not finite if a value is not finite. It is quick, but it can also overflow for large values.
        if not bool(wide.sum().isfinite()) and not bool(wide.isfinite().all()):
            raise AdapterError(f"{self.path}: {self.name} holds NaN or infinity; the adapter is damaged")
        return wide


@dataclass(frozen=True, slots=True)
class Pair:
    """Both factors of a module. The adapter adds scale * (b @ a) to the module's weight."""

    module: str  # as in the file, without PEFT's prefix "base_model.model."
    a: Factor  # [rank, inputs]
    b: Factor  # [outputs, rank]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an adapter's file."""

    pairs: dict[str, Pair]  # by module
    copy: tuple[Path, str, TensorEntry] | None  # of the base's output matrix: file, name, entry


def read_contents(folder: Path) -> Contents:
    """Return the contents of a folder's file. Reads only the header.

    Raises `AdapterError` if the file is damaged, or if a tensor is not a factor.
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
            raise AdapterError(f"{path}: {name} exists twice, with and without PEFT's prefix")
        found[module][factor[2]] = Factor(path, name, entry)
    if not found:
        raise AdapterError(f"{path}: holds no factors (lora_A, lora_B)")
    if copy is not None and not found.keys() & {"lm_head", "language_model.lm_head"}:
        raise AdapterError(f"{path}: {copy[1]} exists without factors of lm_head; {MERGE}")
    return Contents({module: _pair(path, module, factors) for module, factors in found.items()}, copy)


def _pair(path: Path, module: str, factors: Mapping[str, Factor]) -> Pair:
    for kind in "AB":
        if kind not in factors:
            raise AdapterError(f"{path}: {module} lacks lora_{kind}.weight")
    pair = Pair(module, factors["A"], factors["B"])
    for factor in (pair.a, pair.b):
        if len(factor.shape) != 2 or 0 in factor.shape:
            raise AdapterError(f"{path}: {factor.name} has shape {list(factor.shape)}; factors are non-empty matrices")
    return pair


def _what(name: str) -> str:
    return next((what for kind, what in _KINDS if kind.fullmatch(name[:1000])), "is no factor (lora_A, lora_B)")
