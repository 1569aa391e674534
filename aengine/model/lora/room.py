"""The size of a model's memory for adapters."""

from __future__ import annotations

import re

import msgspec

RANKS = (8, 16, 32, 64, 128, 256)  # ranks that kernels support and for which memory is allocated
EXPERTS = ".experts."  # occurs in the names of experts' matrices

_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


class LoraRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the memory for adapters, and the linears that adapters may change."""

    places: int  # numbered from 1; each holds one adapter
    rank: int  # the largest rank that an adapter may have
    kinds: tuple[str, ...]  # of linears that adapters may change, as in `kind_of`
    numbers: int = 0  # how many numbers the factors of one place have

    @property
    def kept_rank(self) -> int:
        """The rank for which each place has memory: `rank`, rounded up to one of RANKS."""
        return next(rank for rank in RANKS if rank >= self.rank)


def kind_of(module: str) -> str:
    """Return the module's name without its layer and its expert."""
    return _EXPERT.sub(EXPERTS, _LAYER.sub("", module))
