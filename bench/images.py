"""Images in chats on one device: time to the first token, images per second, and what they cost streams of text.

    python bench/images.py [--shape gemma3-12b --tower gemma3] [--only first many turns text] [--out results.jsonl]

Dummy weights of Qwen3.5-9B's shape with its tower, or of another one. Each request has an image of its own, a JPEG of
`--side` x `--side` pixels. The cases:

- first: the time to the first token of an image and 64 tokens of text, in process and over HTTP in base64, next to the
  time of as many tokens of text.
- many: `--users` users at once, each with `--rounds` chats about new images, alone and beside `--streams` streams of
  text. `gap` is the time between two fragments of a stream of text.
- turns: the time to the first token of the second turn about an image, next to that of a chat with as many tokens.
- text: the speed of 1 and 8 streams of text, with the tower loaded and with `images` off.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypercorn.asyncio import serve
from hypercorn.config import Config
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from bench.results import Report
from bench.serve import percentile
from bench.shapes import SHAPES, SMALL, TOWERS, add_tower, write_config
from bench.sse_client import Target, ask, first_model

PORT = 8191
TEXT = 64  # tokens
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %} {{ part.text }} {% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
Messages = list[dict[str, Any]]


def write_model(folder: Path, shape: str, tower: str) -> None:
    """Write a shape with a tower, and a tokenizer of one word for each id."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    write_config(folder, shape)
    vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    words = vocab - len(SPECIAL)
    add_tower(folder, tower, vocab - 1)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    image = "<|vision_start|>" if tower.startswith("gemma") else "<|vision_start|><|image_pad|><|vision_end|>"
    template = TEMPLATE.replace("IMAGE", image)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(4000)}" for _ in range(count))


def jpeg(seed: int, side: int) -> bytes:
    """Return a picture of smooth colours, as large as a photograph's file."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, side // 8), max(2, side // 8), 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class Bench:
    """One engine, its server, and requests that were never sent before."""

    def __init__(self, engine: aengine.Engine, options: argparse.Namespace) -> None:
        self.engine = engine
        self._side = options.side
        self._rng = random.Random(options.seed)
        self._number = options.seed * 1_000_000
        self.target = Target(f"http://127.0.0.1:{PORT}")

    def picture(self) -> bytes:
        self._number += 1
        return jpeg(self._number, self._side)

    def chat(self, picture: bytes | None, tokens: int = TEXT) -> Messages:
        parts: list[dict[str, Any]] = [] if picture is None else [{"type": "image", "image": picture}]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": words(self._rng, tokens)}]}]

    async def tokens_of_image(self) -> int:
        """Return how many tokens an image adds to a chat."""
        picture = self.picture()
        with_image, without = [await self.engine.encode_chat(self.chat(one)) for one in (picture, None)]
        return len(with_image.token_ids) - len(without.token_ids)

    async def first(self, messages: Messages) -> float:
        """Return the milliseconds to the first token of a chat, in process."""
        began = time.perf_counter()
        async for _ in self.engine.chat_stream(messages, max_tokens=1, temperature=0, ignore_eos=True):
            return 1e3 * (time.perf_counter() - began)
        raise RuntimeError("no token was drawn")

    async def first_over_http(self, messages: Messages, model: str) -> float:
        """Return the milliseconds from the request's first byte to the first text."""
        sent = msgspec.to_builtins(messages)
        for part in sent[0]["content"]:
            if part["type"] == "image":
                url = "data:image/jpeg;base64," + base64.b64encode(messages[0]["content"][0]["image"]).decode()
                part |= {"type": "image_url", "image_url": {"url": url}}
                del part["image"]
        body = {"model": model, "messages": sent, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        request = self.target.request("POST", "/v1/chat/completions", msgspec.json.encode(body))
        reply = await ask(self.target, request, patience=60.0, keep_text=False)
        if reply.failed is not None:
            raise RuntimeError(reply.failed)
        return 1e3 * reply.ttft

    async def second(self, messages: Messages) -> float:
        """Return the milliseconds to the first token of a chat's second turn."""
        answer = await self.engine.chat(messages, max_tokens=16, temperature=0, ignore_eos=True)
        further = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": words(self._rng, 32)}]
        return await self.first([*messages, *further])

    async def users(self, pictures: list[list[bytes]], output: int) -> float:
        """Let each user ask about some pictures, one after another. Returns images per second."""

        async def user(own: list[bytes]) -> None:
            for one in own:
                await self.engine.chat(self.chat(one), max_tokens=output, temperature=0, ignore_eos=True)

        began = time.perf_counter()
        await asyncio.gather(*map(user, pictures))
        return sum(map(len, pictures)) / (time.perf_counter() - began)

    def pictures(self, users: int, rounds: int) -> list[list[bytes]]:
        """Return new pictures of users. Drawing one takes the loop for 20 ms, so streams must not run meanwhile."""
        return [[self.picture() for _ in range(rounds)] for _ in range(users)]

    async def stream(self, gaps: list[float], tokens: int) -> None:
        """Stream text, and note the seconds between fragments, until the task is cancelled."""
        while True:
            prompt = [self._rng.randrange(4000) for _ in range(128)]
            last = None
            async for _ in self.engine.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now

    async def speed(self, streams: int, tokens: int) -> float:
        """Return tokens per second of streams of text."""
        prompts = [[self._rng.randrange(4000) for _ in range(128)] for _ in range(streams)]
        began = time.perf_counter()
        await asyncio.gather(
            *(self.engine.complete(one, max_tokens=tokens, temperature=0, ignore_eos=True) for one in prompts)
        )
        return streams * tokens / (time.perf_counter() - began)


async def first(bench: Bench, options: argparse.Namespace, report: Report) -> None:
    image, model = await bench.tokens_of_image(), await first_model(bench.target)
    runs: dict[str, list[float]] = {name: [] for name in ("image", "text", "image_http", "text_http")}
    for run in range(options.runs + 1):
        seen, read = bench.chat(bench.picture()), bench.chat(None, TEXT + image)
        again, more = bench.chat(bench.picture()), bench.chat(None, TEXT + image)
        found = {"image": await bench.first(seen), "text": await bench.first(read)}
        found |= {"image_http": await bench.first_over_http(again, model)}
        found |= {"text_http": await bench.first_over_http(more, model)}
        for name, value in found.items() if run else ():  # the first run warms up
            runs[name].append(value)
    middle = {f"{name}_ms": statistics.median(values) for name, values in runs.items()}
    goals = {
        f"goal_{name}_ms": 1.3 * middle[name.replace("image", "text") + "_ms"] + 25 for name in ("image", "image_http")
    }
    report.tell({"case": "first", "image_tokens": image}, middle, runs=runs, reference=goals)


async def many(bench: Bench, options: argparse.Namespace, report: Report) -> None:
    await bench.users(bench.pictures(min(8, options.users), 1), 2)
    for streams in (0, options.streams):
        pictures = bench.pictures(options.users, options.rounds)
        gaps: list[float] = []
        tasks = [asyncio.create_task(bench.stream(gaps, options.stream_tokens)) for _ in range(streams)]
        await asyncio.sleep(options.settle if streams else 0.0)
        quiet = [1e3 * gap for gap in gaps]
        gaps.clear()
        speed = await bench.users(pictures, options.output)
        beside = sorted(1e3 * gap for gap in gaps)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        figures: dict[str, float | None] = {"images_s": speed}
        figures |= {f"gap_ms_p{one}": percentile(beside, one) if beside else None for one in (50, 99)}
        figures["gap_ms_max"] = beside[-1] if beside else None
        figures["gap_ms_p50_without_images"] = statistics.median(quiet) if quiet else None
        case = {"case": "many", "users": options.users, "streams": streams, "output": options.output}
        report.tell(case, figures, reference={"goal_images_s": 30.0, "goal_gap_ms_p99": 120.0})


async def turns(bench: Bench, options: argparse.Namespace, report: Report) -> None:
    image = await bench.tokens_of_image()
    seen, read = [], []
    for run in range(options.runs + 1):
        pair = [await bench.second(bench.chat(bench.picture())), await bench.second(bench.chat(None, TEXT + image))]
        for values, value in zip((seen, read), pair) if run else ():
            values.append(value)
    figures = {"image_ms": statistics.median(seen), "text_ms": statistics.median(read)}
    ratio = {"ratio": figures["image_ms"] / figures["text_ms"], "goal_ratio": 1.1}
    report.tell({"case": "turns", "image_tokens": image}, figures, runs={"image": seen, "text": read}, reference=ratio)


async def text(bench: Bench, options: argparse.Namespace, report: Report) -> None:
    figures = {}
    for streams in (1, 8):
        await bench.speed(streams, 8)
        figures[f"decode{streams}_tok_s"] = max([await bench.speed(streams, options.tokens) for _ in range(2)])
    images = bench.engine.no_images or "loaded"
    report.tell({"case": "text", "tower": images}, figures)


CASES = {"first": first, "many": many, "turns": turns, "text": text}


@asynccontextmanager
async def serving(folder: Path, options: argparse.Namespace, images: str) -> AsyncIterator[Bench]:
    """Run an engine and its server in this process."""
    made: list[aengine.Engine] = []

    def engine(config: EngineConfig) -> aengine.Engine:
        made.append(aengine.Engine(config=config))
        return made[-1]

    knobs: dict[str, Any] = {"max_model_len": options.context, "max_num_seqs": options.users + options.streams}
    knobs |= {"kv_cache_gib": options.kv_cache_gib, "images": images, "speculation": "off"}
    config = EngineConfig(
        model=str(folder), device=options.device, load_format="dummy", progress=False, **knobs
    )  # fmt: skip
    app, stop = create_app(config, ServerConfig(), engine), asyncio.Event()
    hypercorn = Config()
    hypercorn.bind = [f"127.0.0.1:{PORT}"]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(app, hypercorn, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
        await app.settled.wait()
        if app.failure is not None:
            raise app.failure
        print(f"loaded in {time.perf_counter() - began:.1f} s, images {images}", file=sys.stderr, flush=True)
        try:
            yield Bench(made[0], options)
        finally:
            stop.set()


async def measure(options: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.shape, options.tower)
        async with serving(folder, options, "auto") as bench:
            for case in options.only:
                await CASES[case](bench, options, report)
        if "text" in options.only:
            async with serving(folder, options, "off") as bench:
                await text(bench, options, report)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    made.add_argument("--shape", choices=sorted(SHAPES | SMALL), default="qwen3.5-9b")
    made.add_argument("--tower", choices=sorted(TOWERS), default="qwen3.5", help="of the shape's family")
    made.add_argument("--device", default="auto")
    made.add_argument("--context", type=int, default=8192)
    made.add_argument("--kv-cache-gib", type=float, help="default: all of the memory")
    made.add_argument("--side", type=int, default=1024, help="of the images, in pixels")
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--users", type=int, default=64)
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--output", type=int, default=128, help="tokens of an answer about an image")
    made.add_argument("--streams", type=int, default=64, help="of text, beside the users")
    made.add_argument("--stream-tokens", type=int, default=2048)
    made.add_argument("--settle", type=float, default=2.0, help="seconds of the streams alone")
    made.add_argument("--tokens", type=int, default=256, help="of a stream in the case text")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path)
    return made


def main() -> None:
    options = parser().parse_args()
    report = Report("images", options.out)
    asyncio.run(measure(options, report))
    report.print_table()


if __name__ == "__main__":
    main()
