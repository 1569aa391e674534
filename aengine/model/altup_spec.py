"""The specification of layers with several residual streams as data."""

from __future__ import annotations

import msgspec


class AltUpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several streams, of which a layer computes one (AltUp), and a product of low rank next to attention (LAuReL).

    A layer predicts each stream from all of them, computes the active one, and corrects all by the result.
    """

    count: int
    active: int  # the number of the stream that layers compute
    rank: int  # of the product next to attention
    scaled: bool = True  # whether the layer's second embedding reads the active stream times a weight
    first: bool = False  # whether the layer makes the streams from the embedding
    last: bool = False  # whether the layer returns one stream, which is the mean of all

    def parameters(self, hidden: int) -> int:
        coefficients = self.count * self.count * (1 + self.count) + self.count * hidden
        norms = 3 * hidden  # of the router, of the product next to attention, and the weight of the active stream
        return sum(n * k for n, k in self.linears(hidden)) + coefficients + norms

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product. Every rank has them whole."""
        others = self.count - 1
        first = ((others * hidden, hidden),) if self.first else ()
        last = ((hidden, hidden),) * others if self.last else ()
        return *first, (self.rank, hidden), (hidden, self.rank), *last
