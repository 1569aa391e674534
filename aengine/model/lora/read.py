"""From an adapter's folder to its factors in host memory, checked against the linears of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from aengine.errors import AdapterError
from aengine.model.dense import Stored
from aengine.model.lora.adapter import Adapter, Factors
from aengine.model.lora.files import Pair, read_pairs
from aengine.model.lora.memory import Site
from aengine.model.lora.room import LoraRoom, kind_of
from aengine.model.lora.settings import Settings


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the linears that a site fuses."""

    site: str
    name: str
    stored: Stored


class Linears:
    """The linears of a model that adapters can change, by the names that files have for them."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = sites
        self._parts = {name: _Part(site, name, one) for site in sites for name, one in sites[site].parts.items()}

    def part(self, pair: Pair) -> _Part:
        """What the factors change. Raises `AdapterError` where there is no such linear, or one of another shape."""
        part = self._parts.get(pair.module) or self._parts.get(f"model.{pair.module}")
        if part is None:
            kinds = sorted({kind_of(name).rpartition(".")[-1] for name in self._parts})
            raise AdapterError(
                f"{pair.a.path}: {pair.a.name} changes {pair.module}, which is no linear of this model that adapters "
                f"can change ({', '.join(kinds)})"
            )
        stored = part.stored
        expected = {"lora_A": (pair.a.shape[0], stored.inputs), "lora_B": (stored.outputs, pair.a.shape[0])}
        for factor, shape in zip((pair.a, pair.b), expected.values()):
            if factor.shape != shape:
                raise AdapterError(
                    f"{factor.path}: {factor.name} has shape {list(factor.shape)}, for this model it is {list(shape)}; "
                    f"the adapter belongs to another base model"
                )
        return part

    def modules(self) -> Iterator[str]:
        yield from self._parts


def read_adapter(folder: Path, linears: Linears, room: LoraRoom, dtype: torch.dtype) -> Adapter:
    """The adapter in a PEFT folder, its scales multiplied into the second factors, in `dtype`.

    Raises `AdapterError`, which names the field or the tensor, where it is damaged, is not for this model, asks for
    what cannot be applied exactly, or does not fit the room that the model keeps. Blocks for as long as reading takes.
    """
    settings = Settings.from_folder(folder)
    pairs = _by_part(read_pairs(folder), linears)
    _check_targets(folder, settings, pairs, linears)
    rank = max(pair.a.shape[0] for pair in pairs.values())
    if rank > room.rank:
        raise AdapterError(f"{folder}: its rank is {rank}, there is room for {room.rank}: raise max_lora_rank")
    factors: dict[str, Factors] = {}
    for name, pair in pairs.items():
        site = linears.part(pair).site
        if linears.sites[site].weights is None:
            raise AdapterError(
                f"{folder}: it changes {name}, for which no memory is kept: name it, or one like it, in lora when the "
                f"engine starts"
            )
        if site not in factors:
            factors[site] = _empty(linears.sites[site], rank, dtype)
        _fill(factors[site], linears.sites[site], name, pair, settings.scale(name, pair.a.shape[0]))
    return Adapter(rank, factors)


def kinds_of(folder: Path, linears: Linears) -> tuple[int, set[str]]:
    """An adapter's rank, and the kinds of linears that it changes. Reads headers alone. Raises as `read_adapter`."""
    Settings.from_folder(folder)
    pairs = read_pairs(folder).values()
    return max(pair.a.shape[0] for pair in pairs), {kind_of(linears.part(pair).site) for pair in pairs}


def _by_part(pairs: Mapping[str, Pair], linears: Linears) -> dict[str, Pair]:
    """By the names that the model has for what they change."""
    found: dict[str, Pair] = {}
    for pair in pairs.values():
        name = linears.part(pair).name
        if name in found:
            raise AdapterError(f"{pair.a.path}: {pair.a.name} and {found[name].a.name} change the same linear")
        found[name] = pair
    return found


def _check_targets(folder: Path, settings: Settings, pairs: Mapping[str, Pair], linears: Linears) -> None:
    """Raise unless the file holds factors of all linears that the settings name, and of no other."""
    for module in linears.modules():
        named = settings.targets.takes(module)
        if named and module not in pairs:
            raise AdapterError(f"{folder}: target_modules names {module}, the file holds no factors of it")
        if named is False and module in pairs:
            raise AdapterError(
                f"{folder}: the file holds factors of {module}, which target_modules, exclude_modules or "
                f"layers_to_transform leave out"
            )


def _empty(site: Site, rank: int, dtype: torch.dtype) -> Factors:
    parts = list(site.parts.values())
    outputs = sum(part.outputs for part in parts)
    return Factors(
        torch.zeros((len(parts), rank, parts[0].inputs), dtype=dtype), torch.zeros((outputs, rank), dtype=dtype)
    )


def _fill(factors: Factors, site: Site, name: str, pair: Pair, scale: float) -> None:
    names = list(site.parts)
    index = names.index(name)
    first = sum(site.parts[other].outputs for other in names[:index])
    rank, outputs = pair.a.shape[0], site.parts[name].outputs
    factors.a[index, :rank] = pair.a.read()
    factors.b[first : first + outputs, :rank] = pair.b.read().mul_(scale)
