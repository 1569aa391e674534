"""What some models do with the scores of queries and keys beyond scaling them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """softcap c: a score s becomes c * tanh(s / c). sinks [heads] float32: one more score of each head's queries, that
    of a key whose value is zero; nothing is done to it. None: there is no such thing."""

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


PLAIN = Scores()
