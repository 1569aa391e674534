"""A digest of the weights that are read, for what is kept longer than the process that read them."""

from __future__ import annotations

from hashlib import sha256

from aengine.model.checkpoint.pieces import Piece


class WeightsDigest:
    """The SHA-256 of all pieces, whichever order they are read in. `add` may be called in any thread."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str, int], bytes] = {}

    def add(self, piece: Piece, data: memoryview) -> None:
        """Add the contents of a piece. Other threads run meanwhile."""
        self._pieces[piece.path.name, piece.name, piece.start] = sha256(data).digest()

    def result(self) -> bytes:
        """Return the digest, once all pieces have been added."""
        return sha256(repr(sorted(self._pieces.items())).encode()).digest()
