"""Fills a decoder from the safetensors files of a checkpoint.

All headers are read first and compared with the parameters. So a checkpoint that does not fit is refused before memory
is allocated. Then the files are read in order, in pieces that are copied directly into the parameters' memory.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from aengine.errors import WeightsError
from aengine.model.checkpoint.pieces import Piece, RankMemory, cut
from aengine.model.checkpoint.safetensors import INDEX, SINGLE, TensorEntry, read_header
from aengine.model.checkpoint.staging import BUFFER_BYTES, WeightsDigest, copy_pieces, staging_ring
from aengine.model.families.wrappers import language_model_name
from aengine.model.fields import read_json_object
from aengine.model.groups import Entry, Group, PlainTensor, entries_of

log = logging.getLogger("aengine")

# Buffers in old files. They are not read, because they follow from config.json.
_DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEAD = "lm_head.weight"
# The ends of the names of all experts' matrices, if they are floats.
_FUSED_EXPERTS = {"gate_up_proj", "up_proj", "down_proj"}
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor of a parameter in its file."""

    path: Path
    name: str  # in the file
    entry: TensorEntry


class Checkpoint:
    """The weights of one folder, matched to the parameters of one model."""

    def __init__(
        self, folder: Path, groups: Iterable[Group], tied: bool, ignored_prefixes: tuple[str, ...] = ()
    ) -> None:
        """Read the headers only.

        groups: the parameters that the model has.
        tied: whether the output matrix is the embedding. If the files have both, `copy_into` compares them.
        ignored_prefixes: tensors whose names begin with one of these are not read.

        Raises `WeightsError` if a tensor is missing, unexpected, duplicate, or of another shape or dtype, or if a file
        is damaged. The error names the tensor.
        """
        self._sources: dict[str, _Source] = {}
        entries = entries_of(groups)
        unexpected: list[str] = []
        ignored: list[str] = []
        for path in _files(folder):
            for spelled, found in read_header(path).items():
                # Files saved from the bare decoder lack the prefix.
                name = language_model_name(spelled)
                if ignored_prefixes and name.startswith(ignored_prefixes):
                    ignored.append(spelled)
                    continue
                name = name if name in entries or name == _HEAD else f"model.{name}"
                entry = entries.get(_EMBEDDING if tied and name == _HEAD else name)
                if entry is None:
                    if not _DERIVED.fullmatch(spelled):
                        unexpected.append(spelled)
                    continue
                if entry.transposed_as and found.shape == entries[entry.transposed_as].shape:
                    name, entry = entry.transposed_as, entries[entry.transposed_as]
                source = _Source(path, spelled, found)
                if name in self._sources:
                    raise WeightsError(f"{path}: {spelled} is also in {self._sources[name].path.name}")
                _check(source, entry)
                self._sources[name] = source
        self._folder, self._ignored = folder, ignored
        there = set(self._sources)
        for name, entry in entries.items():
            if entry.replaces and name in there:
                if twice := there.intersection(entry.replaces):
                    raise WeightsError(f"{self._sources[name].path}: {name} is also there as {_listed(sorted(twice))}")
                there.update(entry.replaces)
        unknown = f"hold {_listed(unexpected)}, which this model does not have"
        if missing := [name for name, entry in entries.items() if name not in there and not entry.optional]:
            raise WeightsError(
                f"{folder}: the weights lack {_listed(missing)}{f'; they {unknown}' if unexpected else ''}"
            )
        if unexpected:
            raise WeightsError(f"{folder}: the weights {unknown}")

    def copy_into(self, ranks: Sequence[Sequence[Group]], progress: bool, digest: WeightsDigest | None = None) -> None:
        """Fill and close every group of every rank. A tensor of several ranks is read once. Blocks until all is loaded.

        progress: whether a terminal shows a progress bar after two seconds.
        digest: gets all pieces that are read.
        Raises `WeightsError` if reading fails.
        """
        if names := self._ignored:
            log.info("%s: ignored %d tensors of parts that are not used: %s", self._folder, len(names), _listed(names))
        heads: list[tuple[Tensor, Tensor]] = []  # compared at the end, if config.json ties them and the files have both
        fillings: dict[str, list[_Filling]] = {}  # of all ranks, by the tensor's name
        for groups in ranks:
            if _HEAD in self._sources and not any(_HEAD in group.entries for group in groups):
                group = next(group for group in groups if _EMBEDDING in group.entries)
                embedding, entry = group.open([_EMBEDDING])[_EMBEDDING], group.entries[_EMBEDDING]
                heads.append((torch.empty_like(embedding), embedding))
                groups = [*groups, PlainTensor(_HEAD, heads[-1][0], entry=entry)]
            for group in groups:
                there = [name for name in group.entries if name in self._sources]
                if not there:  # all its tensors are optional; closing drops those of an earlier checkpoint
                    group.open(())
                    group.close()
                    continue
                filling = _Filling(group, there, sum(self._sources[name].entry.nbytes for name in there))
                for name in there:
                    fillings.setdefault(name, []).append(filling)
        # Files are read from front to back.
        sources = sorted(self._sources.items(), key=lambda item: (item[1].path, item[1].entry.start))
        first = next(owners[0].place(name) for name, _ in sources if (owners := fillings.get(name)))
        hidden = None if progress else True  # None: unless stderr is a terminal
        sending: deque[list[_Filling]] = deque()  # the groups of each piece, in order
        with tqdm(
            desc="loading weights",
            total=sum(source.entry.nbytes for _, source in sources),
            unit="B",
            unit_scale=True,
            delay=2,
            disable=hidden,
            leave=False,
        ) as bar:

            def pieces() -> Iterator[Piece]:
                for name, source in sources:
                    owners = fillings.get(name, [])
                    places = [owner.place(name) for owner in owners]
                    for piece in cut(source.path, source.name, source.entry, places, BUFFER_BYTES):
                        sending.append(owners)
                        yield piece

            def sent(nbytes: int) -> None:
                bar.update(nbytes)
                for filling in sending.popleft():
                    filling.arrived(nbytes)

            copy_pieces(pieces(), staging_ring(first.into.device), sent, digest)
        if any(not torch.equal(head, embedding) for head, embedding in heads):
            raise WeightsError(
                f"{self._sources[_HEAD].path}: {_HEAD} differs from {_EMBEDDING}, but config.json ties them; "
                f"set tie_word_embeddings to false there if both are meant"
            )


class _Filling:
    """A group whose tensors are being read. It is opened for its first piece and closed after its last piece."""

    def __init__(self, group: Group, names: Collection[str], nbytes: int) -> None:
        """names: the tensors of the group that the files have. nbytes: their bytes in the files."""
        self._group = group
        self._names = names
        self._missing = nbytes
        self._places: Mapping[str, Tensor] | None = None

    def place(self, name: str) -> RankMemory:
        if self._places is None:
            self._places = self._group.open(self._names)
        return RankMemory(self._places[name], self._group.entries[name].cut)

    def arrived(self, nbytes: int) -> None:
        self._missing -= nbytes
        if not self._missing:
            self._places = None  # so that the tensors are freed when the group has used them
            self._group.close()


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors files."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in a folder's files. Reads headers only. Raises `WeightsError`."""
    return frozenset(name for path in _files(folder) for name in read_header(path))


def has_head(folder: Path) -> bool:
    """Return whether a folder has weights with an output matrix. Reads headers only. Raises `WeightsError`."""
    names = stored_names(folder) if has_weights(folder) else ()
    return any(name == _HEAD or name.endswith(f".{_HEAD}") for name in names)


def float_linears(folder: Path) -> Iterator[str]:
    """Yield the modules whose tensors show that their weights are not quantised. Reads names only.

    Yields nothing if the folder has no weights. Raises `WeightsError`.
    """
    if not has_weights(folder):
        return
    names = read_header(folder / SINGLE) if (folder / SINGLE).exists() else _weight_map(folder)
    tensors: dict[str, set[str]] = {}
    for name in names:
        module, _, kind = language_model_name(name).rpartition(".")
        tensors.setdefault(module, set()).add(kind)
    for module, kinds in tensors.items():
        is_linear = "weight" in kinds <= {"weight", "bias"} and "norm" not in module.rpartition(".")[2]
        is_linear = is_linear and f"{module}.weight" not in tensors  # bitsandbytes has tensors of a weight
        if is_linear or kinds <= _FUSED_EXPERTS:
            yield module


def stores_module(folder: Path, module: str) -> bool | None:
    """Return whether a folder has tensors of a module, by its name in a plain language model. Reads names only.

    None: the folder has no weights. Raises `WeightsError`.
    """
    if (folder / SINGLE).exists():
        names: Iterable[str] = read_header(folder / SINGLE)
    elif (folder / INDEX).exists():
        names = _weight_map(folder)
    else:
        return None
    return any(language_model_name(name).startswith(f"{module}.") for name in names)


def find_stored(folder: Path, name: str) -> tuple[Path, TensorEntry] | None:
    """Return the file that holds a tensor of a folder, and its entry. Reads headers only. Raises `WeightsError`."""
    headers = ((path, read_header(path)) for path in _files(folder))
    return next(((path, header[name]) for path, header in headers if name in header), None)


def _check(source: _Source, entry: Entry) -> None:
    fits = source.entry.shape in (entry.shape, *entry.other_shapes)
    if entry.at_most and len(source.entry.shape) == 1:
        fits = source.entry.shape <= entry.shape
    if not fits:
        raise WeightsError(
            f"{source.path}: {source.name} has shape {list(source.entry.shape)}, config.json makes it "
            f"{list(entry.shape)}"
        )
    if source.entry.dtype not in entry.dtypes:
        raise WeightsError(
            f"{source.path}: {source.name} is {source.entry.dtype}; only {', '.join(entry.dtypes)} weights are "
            f"supported"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:200] for name in names[:4]) + more


def _files(folder: Path) -> list[Path]:
    """Return the files with the weights: a single file, or all files that the index names."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        why = f"; {pickled[0]} is a pickle, which can run code when loaded and is never read here" if pickled else ""
        raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}{why}")
    shards = _weight_map(folder).values()
    for shard in shards:
        # A plain name: no folder, no parent folder, no other drive.
        if not isinstance(shard, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors", shard):
            raise WeightsError(f"{folder / INDEX}: weight_map names {str(shard)[:100]!r}, which is no plain file name")
    return [folder / shard for shard in sorted(set(shards))]


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index's file name of each tensor. The names are not checked."""
    shards = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise WeightsError(f"{folder / INDEX}: weight_map must be an object that names a file for each tensor")
    return shards
