"""Keys of pages: sha256 chained over all token ids from the first one on, and over whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

KEY_BYTES = 32


def root_key(fingerprint: bytes, salt: object) -> bytes:
    """What stands before a first page. fingerprint: of whatever else the numbers depend on (weights, dtypes)."""
    return sha256(sha256(fingerprint).digest() + repr(salt).encode()).digest()


def page_keys(before: bytes, token_ids: bytes, page_bytes: int) -> Iterator[bytes]:
    """The keys of consecutive pages behind the one that has the key `before`, each made when it is asked for.

    token_ids: 4 bytes each, of which a page has `page_bytes`; what follows the last whole page is ignored.
    """
    for end in range(page_bytes, len(token_ids) + 1, page_bytes):
        before = sha256(before + token_ids[end - page_bytes : end]).digest()
        yield before
