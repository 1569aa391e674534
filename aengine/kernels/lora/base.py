"""Low-rank adapters of linears: y += B (A x). Every token of a step may have another adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NO_ADAPTER = 0  # the place of tokens without an adapter; adapters have places from 1 on


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """The adapters of one linear, each in a place. A fused linear has several parts, and separate factors for each.

    The memory is allocated once, so a captured step reads the adapter that is in a place when the step is replayed. If
    an adapter lacks a factor or has a smaller rank, the rest is zero. Place NO_ADAPTER stays zero. Both tensors are
    contiguous and may have more than 2^31 elements.
    """

    a: Tensor  # [places, parts * rank, inputs]: the first factors, part after part
    b: Tensor  # [places, outputs, rank]: the second factors, times the adapter's scale
    outputs: tuple[int, ...]  # number of outputs of each part

    @property
    def rank(self) -> int:
        """The largest rank that an adapter may have."""
        return self.b.shape[-1]


@dataclass(slots=True, eq=False)
class ExpertAdapters:
    """The adapters of a layer's experts: `AdapterWeights` for each expert."""

    gate_up: list[AdapterWeights]  # with two parts, or one if there is no gate
    down: list[AdapterWeights]


class TokenAdapters:
    """The adapter of each token of the running pass. All linears of one rank share one object.

    `places` is None if no token has an adapter. Then linears launch the same kernels as without adapters. When it is
    set, followers launch kernels that prepare the pass. So set it during a capture, before the embedding lookup,
    because later kernels may read its tensors early (`kernels/launch.py`).
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None
        self._followers: list[Callable[[Tensor], None]] = []

    @property
    def places(self) -> Tensor | None:
        """The place of each token's adapter, [tokens] int32, in the order of the linears' input rows."""
        return self._places

    @places.setter
    def places(self, places: Tensor | None) -> None:
        self._places = places
        if places is not None:
            for follower in self._followers:
                follower(places)

    def follow(self, follower: Callable[[Tensor], None]) -> None:
        """Call `follower` with the places of each pass that has adapters, before the pass begins."""
        self._followers.append(follower)
