"""What a start-up found that it needs beside the weights, kept beside the kernels that it compiled: the next one of the
same kind need not try the largest step again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from aengine.runtime.driver import driver_version

log = logging.getLogger("aengine")

_Bytes = Annotated[int, Meta(ge=0, le=2**42)]
_MOST_CHARACTERS = 10_000  # of the file: a hundred for each device


class Needs(msgspec.Struct, frozen=True):
    """devices: what the bytes were measured on, rank by rank; nbytes: that each needs for code, the largest step and
    all graphs.
    """

    devices: Annotated[list[str], Meta(max_length=64)]
    nbytes: Annotated[list[_Bytes], Meta(max_length=64)]


def kinds_of(devices: Sequence[torch.device]) -> list[str]:
    """What the memory that code takes on each device hangs on: its name, its size, the driver."""
    driver = driver_version()
    properties = map(torch.cuda.get_device_properties, devices)
    return [f"{one.name}, {one.total_memory} bytes, driver {driver}" for one in properties]


def read_needs(path: Path, devices: Sequence[torch.device]) -> list[int] | None:
    """Those of each device, if they were measured on such devices; None: not known."""
    try:
        with path.open("rb") as file:
            needs = msgspec.json.decode(file.read(_MOST_CHARACTERS), type=Needs)
    except (OSError, msgspec.MsgspecError):
        return None
    known = needs.devices == kinds_of(devices) and len(needs.nbytes) == len(devices)
    return needs.nbytes if known else None


def write_needs(path: Path, devices: Sequence[torch.device], nbytes: Sequence[int]) -> None:
    """At once or not at all; where it cannot be written, the next start-up measures again."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.encode(Needs(kinds_of(devices), list(nbytes))))
        draft.replace(path)
    except OSError as error:
        log.debug("%s: %s", path, error)
        with suppress(OSError):
            draft.unlink()
