"""What a replica tells routers of its cache: the keys of prompts that it holds, while the radix tree does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from aengine.ray_serve.routing.prompt import Prompt

_LOG = 2**16  # changes that are kept for routers that have not heard of them
_READERS = 64
_KEYS_A_PAGE = 32  # texts of other bytes may be the same tokens, and a page that all of them use stays for ever


class Changes(msgspec.Struct, frozen=True, gc=False):
    """What changed since a router last heard of it. `anew`: what it knew before is void."""

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    anew: bool = False


class CachedKeys:
    """Ties the keys of prompts to pages of the radix tree, which it watches.

    A key is held as long as the page is in which its last token lies, or until many others end there. Changes are
    numbered, and every router asks for those since it last did; one that was away for too long begins anew with what
    the log has.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: dict[int, list[int]] = {}  # page -> keys that end in it
        self._pages: dict[int, int] = {}  # key -> its page
        self._log: deque[tuple[int, bool]] = deque(maxlen=_LOG)  # key, and whether it came or went
        self._written = 0  # changes since start
        self._void_before = 0  # changes before this one no longer hold
        self._read: OrderedDict[str, int] = OrderedDict()  # router -> changes it knows

    def __len__(self) -> int:
        """The number of keys that are held."""
        return len(self._pages)

    def note(self, prompt: Prompt, prompt_tokens: int, pages: Sequence[int]) -> None:
        """Tie a prompt's keys to the pages in which the tree holds its first tokens, as far as it does.

        The prompt's own counts of tokens are estimates: they are scaled to the true number.
        """
        scale = prompt_tokens / max(prompt.tokens, 1)
        for key, end in zip(prompt.keys, prompt.ends, strict=True):
            place = max(0, -(-int(end * scale) // self._page_size) - 1)
            if place >= len(pages):
                return
            page = pages[place]
            before = self._pages.get(key)
            if before == page:
                continue
            if before is None:
                self._add(key, True)
            else:
                self._untie(key, before)
            self._pages[key] = page
            ending = self._keys.setdefault(page, [])
            ending.append(key)
            if len(ending) > _KEYS_A_PAGE:
                oldest = ending.pop(0)
                del self._pages[oldest]
                self._add(oldest, False)

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: object) -> None:
        """Nothing: which prompt it was is known where the request is."""

    def removed(self, pages: Sequence[int]) -> None:
        """Forget the keys that end in these pages."""
        for page in pages:
            for key in self._keys.pop(page, ()):
                del self._pages[key]
                self._add(key, False)

    def cleared(self) -> None:
        """Forget all keys."""
        self._keys.clear()
        self._pages.clear()
        self._log.clear()
        self._written += 1
        self._void_before = self._written

    def changes(self, router: str) -> Changes:
        """What changed since this router asked the last time, the newest state of each key."""
        known = self._read.pop(router, 0)
        self._read[router] = self._written
        if len(self._read) > _READERS:
            self._read.popitem(last=False)
        first = self._written - len(self._log)  # the number of the log's first change
        anew = known < max(first, self._void_before)
        count = min(len(self._log), self._written - known)
        newest: dict[int, bool] = {}
        for key, held in islice(reversed(self._log), count):
            newest.setdefault(key, held)
        stored = tuple(key for key, held in newest.items() if held)
        return Changes(stored, tuple(key for key, held in newest.items() if not held), anew)

    def _add(self, key: int, held: bool) -> None:
        self._log.append((key, held))
        self._written += 1

    def _untie(self, key: int, page: int) -> None:
        keys = self._keys[page]
        keys.remove(key)
        if not keys:
            del self._keys[page]
