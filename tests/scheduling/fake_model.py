"""The "model" of the fake device: a hash of the whole prefix, so that equal draws mean equal tokens before them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_MASK = 2**64 - 1


def fold(state: int, token_id: int) -> int:
    """Return the state of a prefix that grew by one token."""
    return ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK


def draw(state: int, seed: int, vocab: int) -> int:
    """Return the token that follows a prefix."""
    mixed = ((state ^ (seed * 0xBF58476D1CE4E5B9)) * 0x94D049BB133111EB) & _MASK
    return (mixed >> 40) % vocab


def root(seed: int, adapter: int) -> int:
    """Return the first item of every prefix of a tenant with an adapter. adapter: its generation; 0: none."""
    return (seed >> 32) + (adapter << 20)


def naive_output(
    prompt: Iterable[int], seed: int, stop_ids: Collection[int], max_total: int, vocab: int, adapter: int = 0
) -> list[int]:
    """Return the output that a request must get: its tokens drawn one by one, with nothing cached."""
    state, total = fold(0, root(seed, adapter)), 0
    for token_id in prompt:
        state, total = fold(state, token_id), total + 1
    output: list[int] = []
    while total < max_total:
        output.append(draw(state, seed, vocab))
        if output[-1] in stop_ids:
            break
        state, total = fold(state, output[-1]), total + 1
    return output


class Prefixes:
    """Numbers every prefix: equal numbers mean equal tokens from the first one on."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self.states = [0]  # by prefix; number 0 is the empty prefix
        self.last = [-1]  # by prefix: its last token
        self.before = [0]  # by prefix: the prefix without its last token

    def grow(self, prefix: int, token_id: int) -> int:
        child = self._children.get((prefix, token_id))
        if child is None:
            child = self._children[prefix, token_id] = len(self.states)
            self.states.append(fold(self.states[prefix], token_id))
            self.last.append(token_id)
            self.before.append(prefix)
        return child

    def path(self, first: int, token_ids: Iterable[int]) -> list[int]:
        """Return the prefixes that end in each of the tokens. first: the item before them (`root`)."""
        prefix, path = self.grow(0, first), []
        for token_id in token_ids:
            prefix = self.grow(prefix, token_id)
            path.append(prefix)
        return path
