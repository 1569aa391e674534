"""The engine: the public async API and the task that steps the model."""

from aengine.engine.engine import Engine
from aengine.engine.stream import Stream

__all__ = ["Engine", "Stream"]
