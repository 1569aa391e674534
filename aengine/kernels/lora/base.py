"""What a low-rank adapter adds to a linear, y += B (A x), where every token of a step may have another adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NO_ADAPTER = 0  # the place of tokens that have none; adapters lie in the places from 1 on


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """The adapters of one linear, which may be several fused ones, each part with factors of its own.

    Their memory is fixed, so that captured steps read whatever adapter lies in a place when they are replayed. What an
    adapter leaves out, or has of a smaller rank, is zero. Both are contiguous, and may have more
    than 2^31 elements.
    """

    # [place] is what a token of that place reads; there is one of NO_ADAPTER too, which stays zero.
    a: Tensor  # [places, parts * rank, inputs]: the parts' first factors, one below the other
    b: Tensor  # [places, outputs, rank]: the second factors, times the adapter's scale; a row is of its part's rank
    outputs: tuple[int, ...]  # of each part

    @property
    def rank(self) -> int:
        """The largest that an adapter may have."""
        return self.b.shape[-1]


class TokenAdapters:
    """Which adapter each token of the running pass has. One object for all linears of a rank.

    `places` is None where no token has an adapter: then linears compute, and launch, what they do without adapters.
    Where it is set, kernels follow with what they need of a pass. So it is set within what a graph captures, and before
    the embedding lookup, behind which kernels may read it early (`kernels/launch.py`).
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None
        self._followers: list[Callable[[Tensor], None]] = []

    @property
    def places(self) -> Tensor | None:
        """[tokens] int32, in the order of the rows of what linears are called with."""
        return self._places

    @places.setter
    def places(self, places: Tensor | None) -> None:
        self._places = places
        if places is not None:
            for follower in self._followers:
                follower(places)

    def follow(self, follower: Callable[[Tensor], None]) -> None:
        """Call it with the places of every pass that has some, before the pass begins."""
        self._followers.append(follower)
