"""An engine that notes which beginnings of prompts it has cached, by the keys under which routers know them."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Self

from aengine.engine import Engine
from aengine.engine.requests.stream import Stream
from aengine.ray_serve.routing.cached_keys import CachedKeys
from aengine.ray_serve.routing.prompt import Prompt


class Asked:
    """A call's prompt as the router hashed it, and, once it has been read, as the model does."""

    __slots__ = ("prompt", "salt", "token_ids")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.token_ids: Sequence[int] | None = None
        self.salt: str | tuple[int, str | None] | None = None


ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)  # of the call that is being answered


class KeyedEngine(Engine):
    """An engine whose calls say by `ASKED` what a router calls their prompt."""

    cached: CachedKeys

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.cached = CachedKeys(self.config.page_size)
        self.prefix_tree.watchers.append(self.cached)
        return self

    def _enqueue(self, token_ids: list[int], *rest: Any) -> Stream:
        stream = super()._enqueue(token_ids, *rest)
        asked = ASKED.get()
        if asked is not None and asked.token_ids is None:  # of several prompts the first
            sequence = self._requests[stream.id].sequences[0]
            asked.token_ids, asked.salt = token_ids, sequence.salt
        return stream

    def note(self, asked: Asked) -> None:
        """Tie a prompt's keys to its pages; called when its first token is there, so that they are in the tree."""
        if asked.token_ids is not None and asked.prompt.keys:
            pages = self.prefix_tree.match(asked.token_ids, asked.salt).pages
            self.cached.note(asked.prompt, len(asked.token_ids), pages)
