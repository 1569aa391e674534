"""The workloads of a load generator by name, seeded, as sessions of one or more requests."""

from __future__ import annotations

import random
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STANDARD = ("random-128-128", "random-2048-128", "random-128-2048", "random-2048-2048", "shared-prefix", "chat")
FIRST_ID = 300  # ids below it are often control tokens or single bytes
# Short words that nearly every tokenizer has as one token with the space before them.
WORDS = re.findall(
    r"\w+",
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know",
)

Prompt = list[int] | str


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    prompt: Prompt  # ids or text; in a chat: what the user says next
    output: int  # tokens to draw
    think: float = 0.0  # seconds before it


@dataclass(frozen=True)
class Session:
    """Requests of one user, one after the other. With `system` they are a chat, each with all that was said before."""

    turns: Sequence[Turn]
    system: str | None = None


def add_options(parser: ArgumentParser) -> None:
    """What shapes the workloads."""
    parser.add_argument("--requests", type=int, default=200, help="of a random workload")
    parser.add_argument("--range-ratio", type=float, default=0.0, help="lengths from L(1 - r) to L(1 + r)")
    parser.add_argument("--groups", type=int, default=64, help="shared-prefix: how many prefixes")
    parser.add_argument("--prompts", type=int, default=16, help="shared-prefix: prompts with each")
    parser.add_argument("--conversations", type=int, default=32, help="chat")
    parser.add_argument("--turns", type=int, default=5, help="chat")
    parser.add_argument("--think", type=float, default=1.0, help="chat: mean seconds before each further turn")
    parser.add_argument("--system", type=int, help="tokens of a shared prefix (2048) or a chat's system prompt (120)")
    parser.add_argument("--question", type=int, help="tokens of a question (128), of a chat's turn (24)")
    parser.add_argument("--output", type=int, help="tokens of an answer to these (256), of a chat's reply (40)")
    parser.add_argument("--prompt", choices=["ids", "text"], default="ids", help="text: about a token per word")
    parser.add_argument("--vocab", type=int, default=4000, help="ids are below this")
    parser.add_argument("--seed", type=int, default=0)


def sessions(name: str, options: Namespace) -> list[Session]:
    """The sessions of a workload. Raises `ValueError` for an unknown name."""
    rng = random.Random(f"{options.seed} {name}")
    if (lengths := re.fullmatch(r"random-(\d+)-(\d+)", name)) is not None:
        return list(_random(rng, options, int(lengths[1]), int(lengths[2])))
    if name == "shared-prefix":
        return _shared_prefix(rng, options)
    if name == "chat":
        return [_conversation(rng, options) for _ in range(options.conversations)]
    raise ValueError(f"unknown workload {name!r}; known are {', '.join(STANDARD)} and random-IN-OUT")


def _random(rng: random.Random, options: Namespace, asked: int, output: int) -> Iterator[Session]:
    for _ in range(options.requests):
        prompt = _prompt(rng, options, _about(rng, asked, options.range_ratio))
        yield Session([Turn(prompt, _about(rng, output, options.range_ratio))])


def _about(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _shared_prefix(rng: random.Random, options: Namespace) -> list[Session]:
    found = []
    for _ in range(options.groups):
        shared = _prompt(rng, options, options.system or 2048)
        for _ in range(options.prompts):
            question = _prompt(rng, options, options.question or 128)
            joined: Prompt = f"{shared}{question}" if isinstance(shared, str) else [*shared, *question]
            found.append(Session([Turn(joined, options.output or 256)]))
    rng.shuffle(found)
    return found


def _conversation(rng: random.Random, options: Namespace) -> Session:
    system = _text(random.Random(options.seed), options.system or 120)  # the same for everyone
    turns = [
        Turn(
            _text(rng, options.question or 24),
            options.output or 40,
            rng.expovariate(1 / options.think) if number and options.think else 0.0,
        )
        for number in range(options.turns)
    ]
    return Session(turns, system)


def _prompt(rng: random.Random, options: Namespace, tokens: int) -> Prompt:
    if options.prompt == "text":
        return _text(rng, tokens)
    return [rng.randrange(FIRST_ID, options.vocab) for _ in range(tokens)]


def _text(rng: random.Random, tokens: int) -> str:
    return "".join(f" {rng.choice(WORDS)}" for _ in range(tokens))
