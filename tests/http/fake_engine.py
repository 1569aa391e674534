"""An engine without torch or a model: it recites words, or streams the fragments that a test provides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from aengine.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from aengine.http import EngineLike
from aengine.latency import Latencies
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat, ChatPrompt
from aengine.text.tokens.settings import TokenizerInfo
from aengine.timeline import Timeline
from aengine.types import (
    AdapterInfo,
    Classes,
    DeviceMemory,
    Embeddings,
    Fragment,
    Ranking,
    Scores,
    SleepMode,
    Stats,
    TokenLogprob,
    TopLogprob,
    Usage,
)

VOCAB_SIZE = 1000
CACHED_TOKENS = 2
WORDS = ("Paris", ", said", ' "she"', ",\n", " été", " 👋")
IDLE = Stats(
    running=0,
    waiting=0,
    pages_total=99,
    pages_used=0,
    pages_cached=9,
    pages_free=90,
    page_size=16,
    steps=7,
    requests=3,
    prompt_tokens=40,
    cached_tokens=10,
    computed_tokens=50,
    generated_tokens=20,
    preemptions=1,
    last_step_age=0.5,
)


# Its entry in /v1/models.
CARD = {
    "id": "fake",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "aengine",
    "root": "fake",
    "parent": None,
    "max_model_len": 64,
    "type": "model",
    "display_name": "fake",
    "created_at": "2023-11-14T22:13:20Z",
    "lifecycle": "active",
    "max_input_tokens": 64,
    "max_tokens": 64,
    "takes_images": False,
}


class FragmentStream(msgspec.Struct):
    """A request that the HTTP layer has submitted."""

    prompt: Any  # text or ids
    params: SamplingParams
    options: dict[str, Any]


class Chat(msgspec.Struct):
    """A chat that the HTTP layer has rendered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class FakeStream:
    def __init__(self, request_id: str, prompt_tokens: int, one_by_one: bool) -> None:
        self.id = request_id
        self.prompt_tokens = prompt_tokens
        self.aborted = asyncio.Event()
        self.ended = False
        self._waiting: deque[Fragment] = deque()
        self._one_by_one = one_by_one  # take() returns one fragment at a time
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    def put(self, *fragments: Fragment) -> None:
        self._waiting.extend(fragments)
        self.ended = self.ended or any(fragment.usage is not None for fragment in fragments)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        self._error, self.ended = error, True
        self._news.set()

    async def take(self) -> list[Fragment]:
        while not self._waiting and not self.ended:
            self._news.clear()
            await self._news.wait()
        if self._error is not None and not self._waiting:
            raise self._error
        if self._one_by_one and self._waiting:
            return [self._waiting.popleft()]
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            self.aborted.set()
            self._news.set()


class FakeTokenizer:
    """The id of a word is its length. Ids from 100 are those of `WORDS`."""

    async def encode(
        self, text: str, add_special_tokens: bool = True, context: int | None = None, left: int = 1
    ) -> list[int]:
        return [len(word) for word in text.split()]

    info: TokenizerInfo
    vocab_size = VOCAB_SIZE
    special_ids = frozenset[int]()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join("x" * token_id for token_id in token_ids)

    def token(self, token_id: int) -> str | None:
        return "x" * token_id

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id - 100].encode() if 100 <= token_id < 100 + len(WORDS) else b"x" * token_id

    def token_text(self, token_id: int) -> str:
        return "x" * token_id


class FakeEngine:
    """Recites its `words`. held: the test fills the streams. refuse: the error of every request."""

    def __init__(self, *, held: bool = False, refuse: Exception | None = None) -> None:
        self.model_name = "fake"
        self.model_names = ("fake", "/models/fake")
        self.max_model_len = 64
        self.flushed = 0  # the number of flushes
        self.created = 1_700_000_000
        self.default_params = SamplingParams(temperature=0.5)
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.timeline: Timeline | None = None
        self.held = held
        self.refuse = refuse
        self.entered = asyncio.Event()
        self.left = False
        self.answer_format = AnswerFormat()
        self.opens_thought = False
        self.words: Sequence[str] = WORDS
        self.together = 1  # tokens in a fragment
        self.chats: list[Chat] = []
        self.submitted: list[FragmentStream] = []
        self.numbers = IDLE
        self.gpus: list[DeviceMemory] = []
        self.latencies = Latencies()
        self.vocab_size = VOCAB_SIZE
        self.tokenizer = FakeTokenizer()
        self.adapters: list[AdapterInfo] = []
        self.lora_loading = False
        self.sleep_mode = False
        self.is_sleeping = False
        self.refusal = ""
        self.no_images = "it reads text only"
        self.images_in_results = False
        self.changes: list[tuple[object, ...]] = []  # of the device's contents
        self._streams: asyncio.Queue[FakeStream] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self.entered.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.left = True

    async def next_stream(self) -> FakeStream:
        """Return the stream of the next request, in the order of arrival."""
        async with asyncio.timeout(30):
            return await self._streams.get()

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, clip: bool = False, **options: Any
    ) -> FakeStream:
        length = len(prompt.split() if isinstance(prompt, str) else prompt)
        if clip and params is not None and params.max_tokens is not None:
            params = msgspec.structs.replace(
                params, max_tokens=min(params.max_tokens, max(1, self.max_model_len - length))
            )
        return self._admit(prompt, length, params, options)

    async def encode_chat(
        self, messages: list[dict[str, Any]], context: int | None = None, **options: Any
    ) -> ChatPrompt:
        self.chats.append(Chat(messages, **options))
        length = sum(len(str(message["content"]).split()) for message in messages)
        return ChatPrompt([1] * length, self.opens_thought)

    def _admit(
        self, prompt: Any, prompt_tokens: int, params: SamplingParams | None, options: dict[str, Any]
    ) -> FakeStream:
        if self.refuse is not None:
            raise self.refuse
        params = params or self.default_params
        params.validate(VOCAB_SIZE)
        if params.max_tokens is not None and prompt_tokens + params.max_tokens > self.max_model_len:
            raise ContextLengthError(
                f"{prompt_tokens} prompt tokens and max_tokens {params.max_tokens} exceed {self.max_model_len}",
                "max_tokens",
            )
        self.submitted.append(FragmentStream(prompt, params, options))
        stream = FakeStream(str(options["request_id"]), prompt_tokens, one_by_one=not self.held)
        if not self.held:
            stream.put(*joined(recital(prompt_tokens, params, self.words), self.together))
        self._streams.put_nowait(stream)
        return stream

    async def embed(self, prompts: Any, **options: Any) -> Embeddings:
        raise InvalidRequestError("the fake embeds nothing", "prompt")

    async def classify(self, prompts: Any, **options: Any) -> Classes:
        raise InvalidRequestError("the fake knows no classes", "prompt")

    async def score(self, queries: Any, documents: Any, **options: Any) -> Scores:
        raise InvalidRequestError("the fake scores nothing", "prompt")

    async def rerank(self, query: str, documents: Any, **options: Any) -> Ranking:
        raise InvalidRequestError("the fake ranks nothing", "prompt")

    def abort(self, request_id: str) -> bool:
        return False

    def has_adapter(self, name: str) -> bool:
        return any(adapter.name == name for adapter in self.adapters)

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.has_adapter(name) and not replace:
            raise InvalidRequestError(f"name: the adapter {name!r} has already been loaded", "name")
        self.adapters = [adapter for adapter in self.adapters if adapter.name != name]
        self.adapters.append(adapter_info(name, path))

    async def unload_adapter(self, name: str) -> None:
        if not self.has_adapter(name):
            raise ModelNotFoundError(f"the adapter {name!r} is not loaded")
        self.adapters = [adapter for adapter in self.adapters if adapter.name != name]

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        self.changes.append(("sleep", level, mode))
        self.is_sleeping = True

    async def wake_up(self) -> None:
        self.changes.append(("wake_up",))
        self.is_sleeping = False

    async def reload(self, folder: str | None = None) -> None:
        self.changes.append(("reload", folder))

    def flush_cache(self) -> None:
        self.flushed += 1

    def stats(self) -> Stats:
        return self.numbers

    def devices(self) -> list[DeviceMemory]:
        return self.gpus


if TYPE_CHECKING:
    _conforms: EngineLike = FakeEngine()  # mypy checks the fake against the protocol


def adapter_info(name: str, path: str, running: int = 0, waiting: int = 0) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        path=path,
        rank=8,
        bytes=2**20,
        created=1_700_000_009,
        on_device=running > 0,
        running=running,
        waiting=waiting,
    )


def recital(prompt_tokens: int, params: SamplingParams, words: Sequence[str] = WORDS) -> list[Fragment]:
    """Return the words, one token each, for all choices in turn, up to max_tokens."""
    count = min(params.max_tokens or len(words), len(words))
    usage = Usage(prompt_tokens, count * params.n, CACHED_TOKENS)
    fragments = [
        Fragment(
            words[position],
            (100 + position,),
            _logprobs(position, words[position], params.logprobs),
            ("stop" if count == len(words) else "length") if position == count - 1 else None,
            index=index,
        )
        for position in range(count)
        for index in range(params.n)
    ]
    fragments[-1] = msgspec.structs.replace(fragments[-1], usage=usage)
    return fragments


def joined(fragments: list[Fragment], together: int) -> list[Fragment]:
    """Join this many fragments of one choice to one."""
    if together == 1:
        return fragments
    runs = [fragments[start : start + together] for start in range(0, len(fragments), together)]
    return [
        msgspec.structs.replace(
            run[-1],
            text="".join(each.text for each in run),
            token_ids=tuple(token_id for each in run for token_id in each.token_ids),
            logprobs=tuple(one for each in run for one in each.logprobs or ()) or None,
        )
        for run in runs
    ]


def _logprobs(position: int, word: str, top: int | None) -> tuple[TokenLogprob, ...] | None:
    if top is None:
        return None
    others = tuple(TopLogprob(500 + rank, f"other{rank}", -2.0 - rank) for rank in range(top))
    return (TokenLogprob(100 + position, word, -0.25, others),)
