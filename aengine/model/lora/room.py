"""How much memory a model has for adapters, and for which of its linears."""

from __future__ import annotations

import re

import msgspec

RANKS = (8, 16, 32, 64, 128, 256)  # that kernels multiply with, and that memory is allocated for

EXPERTS = ".experts."  # in the names of experts' matrices

_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


class LoraRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Places for adapters. They are numbered from 1."""

    places: int
    rank: int  # the largest that an adapter may have
    kinds: tuple[str, ...]  # of linears that adapters may change, as in `kind_of`
    numbers: int = 0  # in the factors of one place

    @property
    def kept_rank(self) -> int:
        """The rank that each place has memory for."""
        return next(rank for rank in RANKS if rank >= self.rank)


def kind_of(module: str) -> str:
    """Return the module's name without its layer and its expert."""
    return _EXPERT.sub(EXPERTS, _LAYER.sub("", module))
