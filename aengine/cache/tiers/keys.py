"""Keys of pages: sha256 chained over all token ids from the first one on, and over their namespace."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

KEY_BYTES = 32


def root_key(fingerprint: bytes, salt: object) -> bytes:
    """Return the key before the first page. fingerprint: digest of the weights, dtypes and the like."""
    return sha256(sha256(fingerprint).digest() + repr(salt).encode()).digest()


def page_keys(before: bytes, token_ids: bytes, page_bytes: int) -> Iterator[bytes]:
    """Generate the keys of consecutive pages after the page with the key `before`.

    token_ids: 4 bytes each. page_bytes: bytes of token ids per page. Bytes after the last whole page are ignored.
    """
    for end in range(page_bytes, len(token_ids) + 1, page_bytes):
        before = sha256(before + token_ids[end - page_bytes : end]).digest()
        yield before
