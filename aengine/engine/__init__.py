"""The engine: the public async API, and the task that runs steps.

In reading order: `engine` (the API, start and end), `service` (the objects that serve requests), `generation` (from a
prompt to a request), `requests/` (arguments, sequences, streams), `loop` (the step loop), `loaded` (a loaded model).
`pooled_answers` and `pooling/` are for embeddings and scores, `sleep` for sleep and new weights, `addons/` for
adapters, KV tiers and KV events. `llm` is the engine without asyncio.
"""

from typing import TYPE_CHECKING

from aengine.engine.interpreter import without_collections
from aengine.engine.requests.stream import Stream

if TYPE_CHECKING:
    from aengine.engine.engine import Engine
    from aengine.engine.llm import LLM

__all__ = ["LLM", "Engine", "Stream"]


def __getattr__(name: str) -> object:
    # Lazy: the client imports streams and argument checks from this package, but no tokenizers or grammars.
    if name == "Engine":
        with without_collections():
            from aengine.engine.engine import Engine

        return Engine
    if name == "LLM":
        with without_collections():
            from aengine.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'aengine.engine' has no attribute {name!r}")
