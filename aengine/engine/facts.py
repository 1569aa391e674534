"""What is known about a loaded engine, its adapters among it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from aengine.cache.radix import RadixTree
from aengine.config import EngineConfig
from aengine.engine.adapters import Adapters
from aengine.engine.loaded import Loaded
from aengine.errors import ConfigError
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.types import AdapterInfo, DeviceMemory


class EngineFacts(ABC):
    """The engine's model, adapters, devices and cache. Raises `EngineNotReadyError` until the model is loaded."""

    config: EngineConfig

    @abstractmethod
    def _ready(self) -> Loaded: ...

    @abstractmethod
    def _serving(self) -> Loaded: ...

    @property
    def model_name(self) -> str:
        """The Hugging Face id, or the checkpoint folder's name; `aengine-demo` for the embedded model."""
        return self.config.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may give: `model_name`, and the path of the checkpoint's folder as it was given."""
        return self.config.model_names

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output, in tokens."""
        return self._ready().runtime.pool.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._ready().runtime.model.vocab_size

    @property
    def default_params(self) -> SamplingParams:
        """What a request gets that names no sampling parameters: the checkpoint's generation_config.json."""
        return self._ready().default_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._ready().tokenizer

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model writes thoughts and calls of tools."""
        return self.tokenizer.answer_format

    def devices(self) -> list[DeviceMemory]:
        """The GPUs that the model lies on, with their memory; asks their driver."""
        return self._ready().runtime.runner.devices()

    def flush_cache(self) -> None:
        """Forget every cached prefix.

        Requests that run keep what they have and go on; nothing of them is cached any more.
        """
        self._ready().scheduler.flush_cache()

    @property
    def prefix_tree(self) -> RadixTree:
        """The prefix cache, for those who watch it."""
        return self._ready().scheduler.memory.tree

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page and row is accounted for. For tests and diagnosis."""
        self._ready().scheduler.check_integrity()

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return adapters.list() if (adapters := self._ready().adapters) is not None else []

    def has_adapter(self, name: str) -> bool:
        """Whether requests may name it."""
        adapters = self._ready().adapters
        return adapters is not None and adapters.has(name)

    @property
    def lora_loading(self) -> bool:
        """Whether clients of a server may load and unload adapters."""
        return self.config.lora_loading

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter, a PEFT folder or a Hugging Face id, while requests go on; then requests may name it.

        One of the same name is an error, unless it is to be replaced; who has it goes on with it. Where loading fails,
        all is as it was: `InvalidRequestError`, `AdapterError`, `HubError`, `ConfigError` where there is no room.
        """
        await self._adapters().load(name, str(path), replace)

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter, and wait until those who have it are done.

        Raises `ModelNotFoundError`.
        """
        await self._adapters().unload(name)

    def _adapters(self) -> Adapters:
        adapters = self._serving().adapters
        if adapters is None:
            raise ConfigError("lora_loading: the device has no room for adapters; start with lora_loading=True")
        return adapters
