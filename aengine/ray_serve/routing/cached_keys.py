"""The keys of prompts that a replica has cached, and the changes that it reports to routers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from aengine.ray_serve.routing.prompt import Prompt

_LOG = 2**16  # newest changes; a router that missed older ones starts again
_READERS = 64  # routers whose place in the log is remembered
_KEYS_A_PAGE = 32  # bounds memory: different texts can be the same tokens, and a shared page is never evicted


class Changes(msgspec.Struct, frozen=True, gc=False):
    """The changes since a router asked last. restart: the router must first forget all keys of the replica."""

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    restart: bool = False


class CachedKeys:
    """Maps the keys of prompts to pages of the radix tree, which it watches.

    A key is kept until the page with its last token is evicted, or until many newer keys end in that page. Changes are
    numbered, and each router asks for those since its last call. A router that missed too many starts again from the
    log.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: dict[int, list[int]] = {}  # page -> keys that end in it
        self._pages: dict[int, int] = {}  # key -> its page
        self._log: deque[tuple[int, bool]] = deque(maxlen=_LOG)  # key; True: stored, False: evicted
        self._written = 0  # changes since start
        self._void_before = 0  # changes with a lower number are void
        self._read: OrderedDict[str, int] = OrderedDict()  # router -> number of changes it has seen

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._pages)

    def note(self, prompt: Prompt, prompt_tokens: int, pages: Sequence[int]) -> None:
        """Map a prompt's keys to the tree's pages of its first tokens; keys beyond these pages are left out.

        The prompt's token counts are estimates. They are scaled to the true number, `prompt_tokens`.
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
                self._unmap(key, before)
            self._pages[key] = page
            ending = self._keys.setdefault(page, [])
            ending.append(key)
            if len(ending) > _KEYS_A_PAGE:
                oldest = ending.pop(0)
                del self._pages[oldest]
                self._add(oldest, False)

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: object) -> None:
        """Do nothing: `note` is called with the prompt itself."""

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
        """Return what changed since this router's last call, with the newest state of each key."""
        known = self._read.pop(router, 0)
        self._read[router] = self._written
        if len(self._read) > _READERS:
            self._read.popitem(last=False)
        first = self._written - len(self._log)  # the number of the log's first change
        restart = known < max(first, self._void_before)
        count = min(len(self._log), self._written - known)
        newest: dict[int, bool] = {}
        for key, held in islice(reversed(self._log), count):
            newest.setdefault(key, held)
        stored = tuple(key for key, held in newest.items() if held)
        return Changes(stored, tuple(key for key, held in newest.items() if not held), restart)

    def _add(self, key: int, held: bool) -> None:
        self._log.append((key, held))
        self._written += 1

    def _unmap(self, key: int, page: int) -> None:
        keys = self._keys[page]
        keys.remove(key)
        if not keys:
            del self._keys[page]
