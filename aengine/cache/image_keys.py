"""Keys of images in the prefix cache.

In the cache, one number stands for all tokens of an image. It is above all ids of vocabularies, so that it equals no
token of text. The tokens before an image, its number and the count of its tokens so far say which of its tokens comes
next, because an image always has the same number of tokens.

Numbers are never used twice. They are valid until the process ends.
"""

from __future__ import annotations

import itertools
import re

from aengine.cache.recently_used import RecentlyUsed

FIRST_KEY = 2**31  # token ids are below 2**24
_KEY = re.compile(rb"[\x80-\xff]")  # the highest byte of a key
_MOST = 2**16  # images whose numbers are known


class ImageKeys:
    """Gives each image a number. If an image was not used for long, it gets a new one, and is computed again."""

    def __init__(self, most: int = _MOST) -> None:
        self._next = itertools.count(FIRST_KEY)
        self._known: RecentlyUsed[bytes, int] = RecentlyUsed(most)

    def key(self, digest: bytes) -> int:
        """Return the number of the image with a digest of all that its embeddings depend on."""
        if (known := self._known.get(digest)) is not None:
            return known
        key = next(self._next)
        self._known.put(digest, key)
        return key

    def forget(self) -> None:
        """Give new numbers from now on, because images are computed with other weights."""
        self._known.clear()


def ids_before_images(token_ids: bytes) -> int:
    """Return how many ids there are before the first key of an image. token_ids: 4 bytes each, little-endian."""
    highest = token_ids[3::4]
    found = None if highest.isascii() else _KEY.search(highest)
    return len(highest) if found is None else found.start()
