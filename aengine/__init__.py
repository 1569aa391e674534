"""aengine: an LLM inference engine in one process and one event loop.

`async with aengine.Engine() as engine: async for fragment in engine.generate("..."): ...`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.config import EngineConfig, ServerConfig
from aengine.errors import (
    AdapterError,
    AengineError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    HubError,
    InvalidRequestError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    QueueFullError,
    ServerError,
    UnsupportedModelError,
    WeightsError,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.types import (
    AdapterInfo,
    Choice,
    Classes,
    Classified,
    Completion,
    Embeddings,
    Fragment,
    Ranked,
    Ranking,
    Scores,
    Stats,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from aengine.client import Client
    from aengine.engine import LLM, Engine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "AdapterInfo",
    "AengineError",
    "CheckpointError",
    "Choice",
    "Classes",
    "Classified",
    "Client",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Embeddings",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineFailedError",
    "EngineNotReadyError",
    "Fragment",
    "HubError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "QueueFullError",
    "Ranked",
    "Ranking",
    "SamplingParams",
    "Scores",
    "ServerConfig",
    "ServerError",
    "Stats",
    "Structured",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnsupportedModelError",
    "Usage",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> object:
    # `Engine` and `LLM` bring tokenizers, `Client` brings httpx2: a program loads only what it uses.
    if name == "Client":
        from aengine.client import Client

        return Client
    if name == "Engine":
        from aengine.engine import Engine

        return Engine
    if name == "LLM":
        from aengine.engine import LLM

        return LLM
    raise AttributeError(f"module 'aengine' has no attribute {name!r}")
