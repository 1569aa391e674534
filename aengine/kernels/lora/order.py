"""The tokens of a pass sorted by adapter, in tiles of one adapter each: once a pass, for all linears."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.experts.plan import Plan, make_plan
from aengine.kernels.lora.base import NO_ADAPTER, TokenAdapters

FEW_TOKENS = 256  # up to which tiles are low: many adapters have a few tokens each
LOW, HIGH = 16, 64  # tokens of a tile at most


class TokenOrder:
    """Made whenever the tokens' places are set."""

    plan: Plan  # its experts are adapters: number i lies in place i + 1
    positions: Tensor  # [tokens] int32: where each lies among the sorted ones; -1 without an adapter
    places: Tensor  # [tokens] int32, as they were set
    height: int  # of the plan's tiles

    def __init__(self, places: int, tokens: TokenAdapters) -> None:
        """places: how many there are, with the one of no adapter."""
        self._adapters = places - 1
        tokens.follow(self._sort)
        if tokens.places is not None:
            self._sort(tokens.places)

    def _sort(self, places: Tensor) -> None:
        self.places = places.contiguous()
        self.height = LOW if len(places) <= FEW_TOKENS else HIGH
        self.plan = make_plan((self.places - 1).unsqueeze(-1), self._adapters, self.height)
        # An ordinary launch, behind which the plan may be read by kernels that have not waited.
        self.positions = torch.where(self.places == NO_ADAPTER, -1, self.plan.places)
