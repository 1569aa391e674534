"""Random requests of every kind, as fast as a number of callers can make them, over raw connections."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CALLERS = 32
PREFIXES = [list(range(300 + 97 * i, 300 + 97 * i + 40 + 60 * i)) for i in range(6)]  # of 40 to 340 tokens
WORDS = [
    "the",
    "sun",
    "rises",
    "in",
    "east",
    "and",
    "people",
    "of",
    "Paris",
    "speak",
    "French",
    "while",
    "water",
    "boils",
    "at",
    "some",
    "degree",
]
CHOICES = ["yes", "no", "perhaps"]
CODE = "[A-Z]{2}-[0-9]{3,5}"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

Check = Callable[[bytes], bool]


@dataclass(slots=True)
class Ask:
    """A request, what may come back, and after how many bytes of the answer the caller leaves, if it does."""

    body: dict[str, Any] | bytes | None
    path: str = "/generate"
    check: Check = lambda answer: True
    statuses: frozenset[int] = frozenset({200, 503})
    headers: dict[str, str] = field(default_factory=dict)
    leave: int | None = None

    def wire(self) -> bytes:
        body = (
            b"" if self.body is None else self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        )
        head = f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1\r\nHost: localhost\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def streamed_out(answer: bytes) -> bool:
    return answer.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer


def whole(answer: bytes) -> bool:
    return "error" not in json.loads(answer)


def ids(rng: random.Random) -> list[int]:
    """Often with a beginning that others have too."""
    shared = rng.choice(PREFIXES)[: rng.randint(1, 400)] if rng.random() < 0.6 else []
    return shared + [rng.randint(300, 4000) for _ in range(rng.randint(1, 300 if rng.random() < 0.05 else 24))]


def length(rng: random.Random) -> int:
    return rng.randint(40, 120) if rng.random() < 0.15 else rng.randint(1, 12)


def sampling(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"max_tokens": length(rng), "temperature": rng.choice([0, 0.7, 1.5])}
    extras: list[dict[str, Any]] = [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"seed": rng.randint(0, 2**40)},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {str(rng.randint(300, 4000)): rng.randint(-100, 100)}},
        {"ignore_eos": True},
        {"min_tokens": 1},
        {"bad_words": ["Paris", "the"]},
        {"priority": rng.randint(-1, 1)},
        {"cache_salt": rng.choice("ab")},
    ]
    for extra in rng.sample(extras, rng.randint(0, 3)):
        given |= extra
    return given


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))


def plain(rng: random.Random) -> Ask:
    return Ask({"input_ids": ids(rng)} | sampling(rng), check=streamed_out)


def completion(rng: random.Random) -> Ask:
    return Ask({"prompt": text(rng)} | sampling(rng), "/v1/completions", whole)


def several_prompts(rng: random.Random) -> Ask:
    prompts = [text(rng) for _ in range(rng.randint(2, 4))]
    stream = rng.random() < 0.5
    return Ask(
        {"prompt": prompts, "stream": stream} | sampling(rng), "/v1/completions", streamed_out if stream else whole
    )


def chat(rng: random.Random) -> Ask:
    stream = rng.random() < 0.7
    messages = [{"role": "user", "content": text(rng)} for _ in range(rng.randint(1, 3))]
    body = {"messages": messages, "stream": stream} | sampling(rng)
    return Ask(body, "/v1/chat/completions", streamed_out if stream else whole)


def choices(rng: random.Random) -> Ask:
    long = {"max_tokens": 60, "ignore_eos": True} if rng.random() < 0.4 else {}  # several that grow drive others out
    return Ask({"input_ids": ids(rng), "n": rng.randint(2, 8)} | sampling(rng) | long, check=streamed_out)


def structured(rng: random.Random) -> Ask:
    def is_choice(answer: bytes) -> bool:
        return json.loads(answer)["text"] in CHOICES

    def is_code(answer: bytes) -> bool:
        return re.fullmatch(CODE, json.loads(answer)["text"]) is not None

    def is_object(answer: bytes) -> bool:
        told = json.loads(answer)
        return told["finish_reason"] != "stop" or isinstance(json.loads(told["text"])["age"], int)

    form, check = rng.choice(
        [
            ({"guided_choice": CHOICES}, is_choice),
            ({"guided_regex": CODE}, is_code),
            ({"guided_json": SCHEMA}, is_object),
        ]
    )
    body = {"prompt": text(rng), "stream": False, "max_tokens": 30, "temperature": rng.choice([0, 1])}
    return Ask(body | form, check=check)


def logprobs(rng: random.Random) -> Ask:
    body = {"input_ids": ids(rng), "logprobs": rng.randint(0, 5), "prompt_logprobs": rng.choice([None, 0, 3])}
    return Ask(body | sampling(rng), check=streamed_out)


def stop_strings(rng: random.Random) -> Ask:
    return Ask(
        {"prompt": text(rng), "stop": rng.sample([".", " the", "e", " of"], 2)} | sampling(rng), check=streamed_out
    )


def tokens(rng: random.Random) -> Ask:
    return Ask({"prompt": text(rng)}, "/tokenize", lambda answer: json.loads(answer)["count"] > 0)


def looks(rng: random.Random) -> Ask:
    return Ask(None, rng.choice(["/metrics", "/health", "/ready", "/v1/models", "/version"]), statuses=frozenset({200}))


def bad(rng: random.Random) -> Ask:
    body, path = rng.choice(
        [
            (b"{", "/generate"),
            (b"", "/v1/completions"),
            ({"prompt": "a", "temperature": -1}, "/generate"),
            ({"prompt": "a", "n": 1000}, "/v1/completions"),
            ({"prompt": "a", "max_tokens": 10**9}, "/generate"),
            ({"input_ids": [10**9]}, "/generate"),
            ({"input_ids": []}, "/generate"),
            ({"prompt": "a", "model": "no-such"}, "/v1/completions"),
            ({"prompt": "a", "guided_regex": "("}, "/generate"),
            ({"prompt": "a", "guided_json": {"type": "nonsense"}}, "/generate"),
            ({"messages": []}, "/v1/chat/completions"),
            ({"messages": [{"content": "a"}]}, "/v1/chat/completions"),
            ({"prompt": "word " * 2000}, "/generate"),
            ({}, "/no/such/path"),
            ({}, "/health"),
        ]
    )
    return Ask(body, path, statuses=frozenset({400, 404, 405, 503}))


def leaving(rng: random.Random) -> Ask:
    body: dict[str, Any] = {"input_ids": ids(rng), "max_tokens": 200, "ignore_eos": True, "n": rng.choice([1, 1, 1, 3])}
    return Ask(body | {"stream": rng.random() < 0.8}, leave=rng.choice([0, 1, 200, 1000, 3000]))


def aborted(rng: random.Random) -> Ask:
    """Of a request that may or may not be running."""
    return Ask({"request_id": f"caller-{rng.randrange(CALLERS)}"}, "/abort", statuses=frozenset({200}))


KINDS: dict[str, tuple[int, Callable[[random.Random], Ask]]] = {
    "plain": (14, plain),
    "completion": (10, completion),
    "several prompts": (5, several_prompts),
    "chat": (10, chat),
    "n": (5, choices),
    "structured": (5, structured),
    "logprobs": (6, logprobs),
    "stop strings": (8, stop_strings),
    "tokenize": (4, tokens),
    "metrics and health": (4, looks),
    "bad": (12, bad),
    "leaving": (12, leaving),
    "abort": (5, aborted),
}


class Traffic:
    """Callers of a server. `served` counts requests by kind, `statuses` counts answers, `faults` lists errors."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._seed = seed
        self._open = asyncio.Event()  # whether new requests may be made
        self._over = False
        self.busy = 0  # callers
        self.served: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    async def flow(self, seconds: float) -> None:
        """Let the callers work for so long, then wait until each has its answer."""
        self._open.set()
        await asyncio.sleep(seconds)
        self._open.clear()
        async with asyncio.timeout(120):
            while self.busy:  # noqa: ASYNC110 - polled a few times in a run
                await asyncio.sleep(0.01)

    def end(self) -> None:
        self._over = True
        self._open.set()

    async def call(self, number: int) -> None:
        """One caller: connections of some requests each, until the end."""
        rng = random.Random(self._seed * 1000 + number)
        names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
        while True:
            await self._open.wait()
            if self._over:
                return
            self.busy += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                for _ in range(rng.randint(1, 20)):
                    (name,) = rng.choices(names, weights)
                    ask = KINDS[name][1](rng)
                    if name not in ("bad", "abort"):
                        ask.headers["X-Request-Id"] = f"caller-{number}"
                    self.served[name] += 1
                    if not await self._exchange(name, ask, reader, writer, rng) or not self._open.is_set():
                        break
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.faults.append(f"{name}: {type(error).__name__} {error}; asked {ask.body!r:.300}")
            finally:
                writer.close()
                self.busy -= 1

    async def _exchange(
        self, name: str, ask: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
    ) -> bool:
        """One request. False: the connection is over."""
        wire = ask.wire()
        if name == "leaving" and rng.random() < 0.1:
            wire = wire[:-5]  # it leaves before it has said all
        writer.write(wire)
        async with asyncio.timeout(120):
            if ask.leave is not None:
                await writer.drain()
                if ask.leave:
                    await heard(reader, ask.leave)
                if rng.random() < 0.5:
                    lingering: socket.socket = writer.get_extra_info("socket")
                    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            status, answer, alive = await read_answer(reader)
        self.statuses[status] += 1
        if status not in ask.statuses:
            self.faults.append(f"{name}: {status} {answer!r:.300}; asked {ask.body!r:.300}")
        elif status == 200 and b'"abort"' not in answer and not ask.check(answer):
            self.faults.append(f"{name}: answered {answer!r:.600}; asked {ask.body!r:.300}")
        return alive


async def heard(reader: asyncio.StreamReader, size: int) -> None:
    """Read up to a number of bytes, or until nothing arrives: the answer is shorter, or waits in the queue."""
    while size > 0:
        try:
            async with asyncio.timeout(0.3):
                data = await reader.read(size)
        except TimeoutError:
            return
        size = size - len(data) if data else 0


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Return status, body, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split(" ", 2)[1])
    if found := re.search(r"content-length: (\d+)", head):
        body = await reader.readexactly(int(found[1]))
    else:
        chunks = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunks.append((await reader.readexactly(size + 2))[:-2])
        await reader.readuntil(b"\r\n")
        body = b"".join(chunks)
    return status, body, "connection: close" not in head
