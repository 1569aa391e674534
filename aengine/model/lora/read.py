"""Reads an adapter's folder into factors in host memory, checked against the linears of the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from aengine.errors import AdapterError
from aengine.model.lora.base_copy import check_copy
from aengine.model.lora.files import Contents, Pair, read_contents
from aengine.model.lora.linears import Change, Linears
from aengine.model.lora.memory import Adapter, Factors, Site
from aengine.model.lora.room import EXPERTS, LoraRoom, kind_of
from aengine.model.lora.settings import Settings

log = logging.getLogger("aengine")


def read_adapter(
    folder: Path, linears: Linears, room: LoraRoom, dtype: torch.dtype, base: Path | None = None
) -> Adapter:
    """Return the adapter in a PEFT folder, in `dtype`. The second factors include the adapter's scale.

    base: the folder of the base model's weights. A copy of its output matrix is compared with them.

    Does blocking I/O; call it in a worker thread.

    Raises `AdapterError` if the adapter is damaged, belongs to another model, cannot be applied exactly, or needs more
    memory than the model has. The error names the field or the tensor.
    """
    settings = Settings.from_folder(folder)
    contents = read_contents(folder)
    found = list(_changes(folder, contents, settings, linears, warn=True))
    rank = max(change.rank for _, changes in found for change in changes)
    if rank > room.rank:
        raise AdapterError(f"{folder}: its rank is {rank}, there is room for {room.rank}: raise max_lora_rank")
    for _, changes in found:
        for change in changes:
            if kind_of(linears.site(change.name)[0]) not in room.kinds:
                raise AdapterError(
                    f"{folder}: it changes {change.name}, for which no memory is kept: name it, or one like it, in "
                    f"lora when the engine starts"
                )
    if contents.copy is not None:
        check_copy(*contents.copy, base)
    if left := sum(not changes for _, changes in found):
        log.info("%s: ignored its factors of %d modules of parts that are not used", folder, left)
    factors: dict[str, Factors] = {}
    for pair, changes in found:
        a, b = pair.a.read(), pair.b.read()
        for change in changes:
            scale = settings.scale(change.module, change.rank)
            name, site, part = linears.site(change.name)
            if name not in factors:
                factors[name] = _empty(site, rank, dtype)
            first = sum(one.outputs for one in list(site.parts.values())[:part])
            own, second = change.unpack(a, b)
            factors[name].a[part, : change.rank] = own
            factors[name].b[first : first + len(second), : change.rank] = second * scale
    return Adapter(rank, factors)


def kinds_of(folder: Path, linears: Linears) -> tuple[int, set[str]]:
    """Return an adapter's rank, and the kinds of linears that it changes. Reads headers only.

    Raises `AdapterError` as `read_adapter` does.
    """
    settings, contents = Settings.from_folder(folder), read_contents(folder)
    found = [change for _, changes in _changes(folder, contents, settings, linears) for change in changes]
    return max(change.rank for change in found), {kind_of(linears.site(change.name)[0]) for change in found}


def _changes(
    folder: Path, contents: Contents, settings: Settings, linears: Linears, warn: bool = False
) -> Iterator[tuple[Pair, list[Change]]]:
    """Yield each pair of factors in a file, with the linears that it changes.

    warn: whether to log linears that the settings name but the file lacks.
    Raises `AdapterError` if a linear is changed twice, if none is changed, or if the settings exclude one.
    """
    changed: dict[str, Pair] = {}
    ours = theirs = ""  # prefixes before "layers." in the model's names, and in the file's names
    for pair in contents.pairs.values():
        changes = linears.changes(pair, settings.peft_version)
        for change in changes:
            if change.name in changed:
                other = changed[change.name]
                raise AdapterError(f"{pair.a.path}: {pair.a.name} and {other.a.name} change the same linear")
            changed[change.name] = pair
            if "layers." in pair.module:
                ours, theirs = (one.partition("layers.")[0] for one in (change.name, pair.module))
        yield pair, changes
    if not changed:
        raise AdapterError(f"{folder}: it changes only parts of the model that are not used here")
    lacking: list[str] = []
    for name in linears.names():
        if EXPERTS in name:  # their names differ between versions of transformers
            continue
        if name in changed:
            spelled = changed[name].module
        else:
            spelled = theirs + name.removeprefix(ours) if name.startswith(f"{ours}layers.") else name
        named = settings.targets.matches(spelled)
        if named and name not in changed:
            lacking.append(name)
        if named is False and name in changed:
            raise AdapterError(
                f"{folder}: the file holds factors of {name}, which target_modules, exclude_modules or "
                f"layers_to_transform leave out"
            )
    if lacking and warn:  # PEFT adds nothing there either
        log.warning(
            "%s: target_modules names %d linears without factors in the file, such as %s: nothing is added there",
            folder, len(lacking), lacking[0],
        )  # fmt: skip


def _empty(site: Site, rank: int, dtype: torch.dtype) -> Factors:
    parts = list(site.parts.values())
    outputs = sum(part.outputs for part in parts)
    return Factors(
        torch.zeros((len(parts), rank, parts[0].inputs), dtype=dtype), torch.zeros((outputs, rank), dtype=dtype)
    )
