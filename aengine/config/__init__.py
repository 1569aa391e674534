"""The knobs, each defined once: name, type, default and one line of help.

The variable `AENGINE_MAX_MODEL_LEN=4096` sets the knob `max_model_len`, and so does the flag `--max-model-len 4096`.
`configure` builds a config from both; a flag wins over a variable.
"""

from aengine.config.engine import MAX_LORA_RANK, MAX_LORAS, EngineConfig
from aengine.config.replicas import ReplicasConfig
from aengine.config.server import CallFormatName, ListenConfig, ServerConfig
from aengine.config.speculation import Speculation

__all__ = [
    "MAX_LORAS",
    "MAX_LORA_RANK",
    "CallFormatName",
    "EngineConfig",
    "ListenConfig",
    "ReplicasConfig",
    "ServerConfig",
    "Speculation",
]
