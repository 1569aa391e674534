"""Stores the memory needs that a start-up has measured, in a file next to its compiled kernels.

The next start-up with the same configuration then does not run the trial step.
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

from aengine.runtime.preload import driver_version

log = logging.getLogger("aengine")

_Bytes = Annotated[int, Meta(ge=0, le=2**42)]
_MOST_BYTES = 10_000  # of the file; a device takes about a hundred


class MeasuredMemory(msgspec.Struct, frozen=True):
    """The memory that each device needs besides weights and pools."""

    devices: Annotated[list[str], Meta(max_length=64)]  # as `describe_devices` returns them
    nbytes: Annotated[list[_Bytes], Meta(max_length=64)]  # for code, the largest step and all graphs


def describe_devices(devices: Sequence[torch.device]) -> list[str]:
    """Return the name, memory and driver of each device. The memory of loaded code depends on them."""
    driver = driver_version()
    properties = map(torch.cuda.get_device_properties, devices)
    return [f"{one.name}, {one.total_memory} bytes, driver {driver}" for one in properties]


def read_needs(path: Path, devices: Sequence[torch.device]) -> list[int] | None:
    """Return the bytes that each device needs, or None if the file has no measurement of such devices."""
    try:
        with path.open("rb") as file:
            needs = msgspec.json.decode(file.read(_MOST_BYTES), type=MeasuredMemory)
    except (OSError, msgspec.MsgspecError):
        return None
    known = needs.devices == describe_devices(devices) and len(needs.nbytes) == len(devices)
    return needs.nbytes if known else None


def write_needs(path: Path, devices: Sequence[torch.device], nbytes: Sequence[int]) -> None:
    """Write the file atomically. If that fails, the next start-up measures again."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.encode(MeasuredMemory(describe_devices(devices), list(nbytes))))
        draft.replace(path)
    except OSError as error:
        log.debug("%s: %s", path, error)
        with suppress(OSError):
            draft.unlink()
