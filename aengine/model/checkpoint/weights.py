"""FactorCopy a decoder from the safetensors files of a checkpoint.

All headers are read first and every parameter is accounted for, so that a checkpoint that does not fit
is refused before any memory is taken. Then the files are read from front to back, in pieces that go
straight to their places.
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
from aengine.model.checkpoint.pieces import Piece, Place, cut
from aengine.model.checkpoint.safetensors import INDEX, SINGLE, TensorEntry, read_header
from aengine.model.checkpoint.staging import BUFFER_BYTES, WeightsDigest, copy_pieces, staging_ring
from aengine.model.families.wrappers import alone
from aengine.model.fields import read_json_object
from aengine.model.groups import Entry, Group, PlainTensor, entries_of

log = logging.getLogger("aengine")

# Buffers that old files carry and that follow from config.json.
_DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter is found."""

    path: Path
    name: str  # as the file spells it
    entry: TensorEntry


class Checkpoint:
    """The weights of one folder, matched to the parameters of one model."""

    def __init__(
        self, folder: Path, groups: Iterable[Group], tied: bool, ignored_prefixes: tuple[str, ...] = ()
    ) -> None:
        """Read the headers only.

        groups: the parameters that the model has.
        tied: whether the output matrix is the embedding. If the files hold it, `copy_into` checks that it is.
        ignored_prefixes: tensors whose names begin with one of these are not read.

        Raises `WeightsError`, naming the tensor, if one is missing, unexpected, there twice, of another shape or
        dtype, or if a file is damaged.
        """
        self._sources: dict[str, _Source] = {}
        entries = entries_of(groups)
        unexpected: list[str] = []
        left: list[str] = []
        for path in _files(folder):
            for spelled, found in read_header(path).items():
                # Files saved from the bare decoder lack the prefix.
                name = alone(spelled)
                if ignored_prefixes and name.startswith(ignored_prefixes):
                    left.append(spelled)
                    continue
                name = name if name in entries or name == _HEAD else f"model.{name}"
                entry = entries.get(_EMBEDDING if tied and name == _HEAD else name)
                if entry is None:
                    if not _DERIVED.fullmatch(spelled):
                        unexpected.append(spelled)
                    continue
                source = _Source(path, spelled, found)
                if name in self._sources:
                    raise WeightsError(f"{path}: {spelled} is also in {self._sources[name].path.name}")
                _check(source, entry)
                self._sources[name] = source
        if left:
            log.info("%s: ignored %d tensors of parts that are not used: %s", folder, len(left), _listed(left))
        there = set(self._sources)
        for name, entry in entries.items():
            if entry.replaces and name in there:
                if twice := there.intersection(entry.replaces):
                    raise WeightsError(f"{self._sources[name].path}: {name} is also there as {_listed(sorted(twice))}")
                there.update(entry.replaces)
        if missing := [name for name, entry in entries.items() if name not in there and not entry.optional]:
            raise WeightsError(f"{folder}: the weights lack {_listed(missing)}")
        if unexpected:
            raise WeightsError(f"{folder}: the weights hold {_listed(unexpected)}, which this model does not have")

    def copy_into(self, ranks: Sequence[Sequence[Group]], progress: bool, digest: WeightsDigest | None = None) -> None:
        """Fill and close every group of every rank; what several of them keep is read once.

        Blocks until all is there. digest: gets all that is read. `progress` shows a bar on a terminal once it has taken
        two seconds. Raises `WeightsError` when reading fails.
        """
        heads: list[tuple[Tensor, Tensor]] = []  # of a file whose config.json ties them: to be held against each other
        fillings: dict[str, list[_Filling]] = {}  # of all ranks that read the tensor
        for groups in ranks:
            group = next(group for group in groups if _EMBEDDING in group.entries)
            embedding, entry = group.open([_EMBEDDING])[_EMBEDDING], group.entries[_EMBEDDING]
            if _HEAD in self._sources and not any(_HEAD in group.entries for group in groups):
                heads.append((torch.empty_like(embedding), embedding))
                groups = [*groups, PlainTensor(_HEAD, heads[-1][0], entry=entry)]
            for group in groups:
                there = [name for name in group.entries if name in self._sources]
                if not there:  # all of it is optional, and what an earlier checkpoint had of it goes
                    group.open(())
                    group.close()
                    continue
                filling = _Filling(group, there, sum(self._sources[name].entry.nbytes for name in there))
                for name in there:
                    fillings.setdefault(name, []).append(filling)
        # Files are read from front to back.
        sources = sorted(self._sources.items(), key=lambda item: (item[1].path, item[1].entry.start))
        hidden = None if progress else True  # None: unless stderr is a terminal
        on_the_way: deque[list[_Filling]] = deque()  # the owners of each piece, in order
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
                        on_the_way.append(owners)
                        yield piece

            def sent(nbytes: int) -> None:
                bar.update(nbytes)
                for filling in on_the_way.popleft():
                    filling.arrived(nbytes)

            copy_pieces(pieces(), staging_ring(embedding.device), sent, digest)
        if any(not torch.equal(head, embedding) for head, embedding in heads):
            raise WeightsError(
                f"{self._sources[_HEAD].path}: {_HEAD} differs from {_EMBEDDING}, but config.json ties them; "
                f"set tie_word_embeddings to false there if both are meant"
            )


class _Filling:
    """A group on its way: opened for its first piece, closed behind its last."""

    def __init__(self, group: Group, names: Collection[str], nbytes: int) -> None:
        """names: of its tensors that are there; nbytes: of all of them in their files."""
        self._group = group
        self._names = names
        self._missing = nbytes
        self._places: Mapping[str, Tensor] | None = None

    def place(self, name: str) -> Place:
        if self._places is None:
            self._places = self._group.open(self._names)
        return Place(self._places[name], self._group.entries[name].cut)

    def arrived(self, nbytes: int) -> None:
        self._missing -= nbytes
        if not self._missing:
            self._places = None  # so that nothing outlives what the group makes of it
            self._group.close()


def stored_names(folder: Path) -> frozenset[str]:
    """The tensors of a folder, as its files spell them; reads headers only. Raises `WeightsError`."""
    return frozenset(name for path in _files(folder) for name in read_header(path))


def has_head(folder: Path) -> bool:
    """Whether a folder has weights, and an output matrix among them; reads headers only. Raises `WeightsError`."""
    any_files = (folder / SINGLE).exists() or (folder / INDEX).exists()
    return any_files and any(name == _HEAD or name.endswith(f".{_HEAD}") for name in stored_names(folder))


def float_linears(folder: Path) -> Iterator[str]:
    """Modules of a folder that have a weight, and nothing that a quantised one would have as well. Reads names only.

    Nothing where the folder has no weights. Raises `WeightsError`.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return
    names = read_header(folder / SINGLE) if (folder / SINGLE).exists() else _weight_map(folder)
    tensors: dict[str, set[str]] = {}
    for name in names:
        module, _, kind = alone(name).rpartition(".")
        tensors.setdefault(module, set()).add(kind)
    for module, kinds in tensors.items():
        if "weight" in kinds <= {"weight", "bias"} and "norm" not in module.rpartition(".")[2]:
            yield module


def find_stored(folder: Path, name: str) -> tuple[Path, TensorEntry] | None:
    """The file that holds a tensor of a folder, and where in it; reads headers only. Raises `WeightsError`."""
    headers = ((path, read_header(path)) for path in _files(folder))
    return next(((path, header[name]) for path, header in headers if name in header), None)


def _check(source: _Source, entry: Entry) -> None:
    if source.entry.shape not in (entry.shape, *entry.other_shapes):
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
    """The files that hold the weights: one, or those of an index."""
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
    """The file of each tensor, as the index has it, unchecked."""
    shards = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise WeightsError(f"{folder / INDEX}: weight_map must be an object that names a file for each tensor")
    return shards
