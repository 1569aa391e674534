"""The engine: the public async API and the task that steps the model."""

from typing import TYPE_CHECKING

from aengine.engine.requests.stream import Stream
from aengine.engine.without_collections import without_collections

if TYPE_CHECKING:
    from aengine.engine.engine import Engine
    from aengine.engine.llm import LLM

__all__ = ["LLM", "Engine", "Stream"]


def __getattr__(name: str) -> object:
    # The client shares this room's mailbox and argument checks, but does not wait for tokenizers and grammars.
    if name == "Engine":
        with without_collections():
            from aengine.engine.engine import Engine

        return Engine
    if name == "LLM":
        with without_collections():
            from aengine.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'aengine.engine' has no attribute {name!r}")
