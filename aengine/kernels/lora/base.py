"""What a low-rank adapter adds to a linear: y += B (A x). Every token of a step may have another adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NO_ADAPTER = 0  # the place of tokens without an adapter; adapters have places from 1 on


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """The adapters of one linear. A fused linear has several parts, each with factors of its own.

    The memory is allocated once, so a captured step reads the adapter that is in a place when the step is replayed.
    Factors that an adapter does not have, and the rest of a smaller rank, are zero. Place NO_ADAPTER stays zero. Both
    tensors are contiguous and may have more than 2^31 elements.
    """

    a: Tensor  # [places, parts * rank, inputs]: the first factors, part after part
    b: Tensor  # [places, outputs, rank]: the second factors, times the adapter's scale
    outputs: tuple[int, ...]  # of each part

    @property
    def rank(self) -> int:
        """The largest rank that an adapter may have."""
        return self.b.shape[-1]


@dataclass(slots=True, eq=False)
class ExpertAdapters:
    """The adapters of a layer's experts: `AdapterWeights` for each expert."""

    gate_up: list[AdapterWeights]  # with two parts
    down: list[AdapterWeights]


class TokenAdapters:
    """Which adapter each token of the running pass has. All linears of one rank share one object.

    `places` is None if no token has an adapter: then linears launch the same kernels as without adapters. If it is
    set, followers launch kernels that prepare the pass. So set it inside what a graph captures, before the embedding
    lookup: later kernels may read its tensors early (`kernels/launch.py`).
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None
        self._followers: list[Callable[[Tensor], None]] = []

    @property
    def places(self) -> Tensor | None:
        """[tokens] int32, in the order of the rows that linears get."""
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
