"""What a low-rank adapter adds to a linear, y += B (A x), where every token of a step may have another adapter."""

from __future__ import annotations

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
    """

    def __init__(self) -> None:
        self.places: Tensor | None = None  # [tokens] int32, in the order of the rows of what linears are called with
