"""How much room a model keeps for adapters, and in which of its linears."""

from __future__ import annotations

import re

import msgspec

RANKS = (8, 16, 32, 64, 128, 256)  # that memory is kept for: what kernels multiply with

EXPERTS = ".experts."  # in the names of experts' matrices

_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


class LoraRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The places of adapters, numbered from 1."""

    places: int
    rank: int  # the largest that an adapter may have
    kinds: tuple[str, ...]  # of linears that adapters may change, as `kind_of` says
    numbers: int = 0  # of the factors of one place

    @property
    def kept_rank(self) -> int:
        """What each place has memory for."""
        return next(rank for rank in RANKS if rank >= self.rank)


def kind_of(module: str) -> str:
    """What the module is called in every layer, and of every expert."""
    return _EXPERT.sub(EXPERTS, _LAYER.sub("", module))
