"""The job of a process that compiles kernels."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a start-up's kernels that one process compiles."""

    config: EngineConfig
    model: ModelConfig
    dtype: str
    capability: tuple[int, int]
    launch: Launch
    kv_bytes: int  # approximate bytes of the KV pool
    package: Literal["triton", "flash-attn-4"] = "triton"
    index: int = 0  # of this process
    count: int = 1  # processes that share the kernels of `package`
    threads: int = 1  # threads that compile
