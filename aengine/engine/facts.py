"""The read-only properties of an engine: its state, its model, its statistics."""

from __future__ import annotations

import asyncio

from aengine.cache.radix import RadixTree
from aengine.config import EngineConfig
from aengine.engine.loaded import Loaded
from aengine.engine.service import Service
from aengine.errors import EngineClosedError, EngineNotReadyError, InvalidRequestError
from aengine.latency import Latencies
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.timeline import Timeline
from aengine.types import AdapterInfo, DeviceMemory, Stats

NOT_ENTERED = (
    "the engine has not been started: use it as `async with aengine.Engine(...) as engine: ...`; programs without "
    "asyncio use aengine.LLM(...)"
)


class EngineFacts:
    """The base class of `Engine`. Properties that need the model raise `EngineNotReadyError` until it is loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.failed = asyncio.Event()  # set when the engine has failed; `failure` is the error
        self.latencies = Latencies()
        self.timeline: Timeline | None = None  # set on entering, if the config asks for one
        self.created = 0  # unix seconds when the engine became ready
        self._service: Service | None = None  # None: the model is not loaded
        self._closed = False
        self._entered_loop: asyncio.AbstractEventLoop | None = None  # the loop on which the engine was entered

    def _loaded_service(self) -> Service:
        if self._entered_loop is None:
            raise EngineNotReadyError(NOT_ENTERED)
        if self._service is None:
            raise EngineNotReadyError("the engine is still loading")
        return self._service

    def _ready(self) -> Loaded:
        return self._loaded_service().loaded

    def _serving(self) -> Service:
        """Return the service if it accepts new requests from this task. Otherwise raise as `Engine.submit` does."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        service = self._loaded_service()
        service.requests.check()
        if asyncio.get_running_loop() is not self._entered_loop:  # the consumer would never be woken
            raise InvalidRequestError("the engine serves the event loop that it was entered on, and no other")
        return service

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's service, or None."""
        return None if self._service is None else self._service.requests.failure

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, so that the device's memory is free."""
        return self._service is not None and self._service.changes.asleep

    @property
    def refusal(self) -> str:
        """Why requests are refused. Empty if they are accepted, or if they wait for a reload of the weights."""
        return "" if self._service is None else self._service.requests.gate.refusal

    # ---- the model ----------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The Hugging Face id, or the checkpoint folder's name; `aengine-demo` for the embedded model."""
        return self.config.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model names that requests may use: `model_name`, and the checkpoint's path as it was configured."""
        return self.config.model_names

    @property
    def lora_loading(self) -> bool:
        """Whether clients of a server may load and unload adapters."""
        return self.config.lora_loading

    @property
    def sleep_mode(self) -> bool:
        """Whether the engine can sleep."""
        return self.config.sleep_mode

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output, in tokens."""
        return self._ready().max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._ready().runtime.model.vocab_size

    @property
    def no_images(self) -> str:
        """Why chats may not contain images. Empty if they may."""
        return self._ready().no_images

    @property
    def images_in_results(self) -> bool:
        """Whether results of tools may have images as well, which depends on the chat template."""
        images = self._ready().images
        return images is not None and images.in_results

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that sets none. They come from the checkpoint's generation_config.json."""
        return self._ready().default_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._ready().tokenizer

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model writes thoughts and tool calls."""
        return self.tokenizer.answer_format

    @property
    def prefix_tree(self) -> RadixTree:
        """The prefix cache, for watchers."""
        return self._ready().scheduler.memory.tree

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return adapters.list() if (adapters := self._ready().adapters) is not None else []

    def has_adapter(self, name: str) -> bool:
        """Return whether requests may name the adapter."""
        adapters = self._ready().adapters
        return adapters is not None and adapters.has(name)

    def devices(self) -> list[DeviceMemory]:
        """Query the memory of each GPU that holds the model."""
        return self._ready().runtime.runner.devices()

    def stats(self) -> Stats:
        """Return a snapshot of the engine's statistics. Cheap."""
        return self._loaded_service().stats()

    def flush_cache(self) -> None:
        """Drop every cached prefix. Running requests keep their pages, but these pages are no longer cached."""
        self._ready().scheduler.flush_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping of pages and rows is inconsistent. For tests and diagnosis."""
        self._ready().scheduler.check_integrity()
