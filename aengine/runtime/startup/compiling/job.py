"""The job of a process that compiles kernels."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig
from aengine.model.spec.attention import AttentionSpec, LatentSpec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a start-up's kernels that one process compiles."""

    config: EngineConfig
    model: ModelConfig
    dtype: str
    capability: tuple[int, int]
    launch: Launch
    kv_bytes: int  # approximate bytes of the KV pool
    proposer: str = "off"  # `ProposerChoice.name`, or off
    most_drafts: int = 0
    package: Literal["triton", "flash-attn-4"] = "triton"
    index: int = 0  # of this process
    count: int = 1  # processes that share the kernels of `package`
    threads: int = 1  # threads that compile

    @property
    def attending(self) -> list[tuple[AttentionSpec | LatentSpec, int]]:
        """The attention of all layers, those of a draft head included, and the ranks that each is spread over."""
        model = self.model
        found = [(one, model.ranks) for one in model.attending]
        if model.drafting and model.mtp is not None:
            found.append((model.mtp.attention, model.ranks))
        if (head := model.added_head) is not None:
            found += [(one, head.spread_over(model.ranks)) for one in head.attention]
        return found
