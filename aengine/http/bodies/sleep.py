"""Bodies of the endpoints that put the engine to sleep, and that reload its weights."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SleepState(msgspec.Struct, frozen=True):
    """`GET /is_sleeping`, `POST /sleep` and `POST /wake_up`."""

    is_sleeping: bool


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /reload`."""

    folder: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None  # None: the model's own


class Reloaded(msgspec.Struct, frozen=True):
    """`POST /reload`."""

    reloaded: bool = True
