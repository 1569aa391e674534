"""Opens the model for a command: an engine in this process, or a client of a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aengine.cli.errors import UsageError
from aengine.cli.knobs import add_knobs, given_knobs, read_knobs
from aengine.config import EngineConfig
from aengine.config.configure import flag
from aengine.types import Completion, Fragment

if TYPE_CHECKING:
    from aengine.client import Client
    from aengine.engine import Engine


class Model(Protocol):
    """The methods that commands use of an `aengine.Engine` or an `aengine.Client`."""

    async def complete(self, prompt: Any, **options: Any) -> Completion: ...

    async def chat(self, messages: Any, **options: Any) -> Completion: ...

    def chat_stream(self, messages: Any, **options: Any) -> AsyncGenerator[Fragment, None]: ...


def add_model_or_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a server, of an engine in this process, and `--adapter`.

    The engine's knob `seed` is left out: the flag `--seed` is a sampling parameter here.
    """
    group = parser.add_argument_group("a server instead of a model in this process")
    group.add_argument("--url", metavar="URL", help="address of an aengine server, such as http://localhost:8000")
    group.add_argument("--api-key", metavar="KEY", help="the server's API key, if it needs one (AENGINE_API_KEY)")
    parser.add_argument("--adapter", metavar="NAME", help="LoRA adapter to use: one of --lora, or one of the server's")
    add_knobs(parser, EngineConfig, "the engine, without --url", skip=("seed",))


@asynccontextmanager
async def opened_model(args: argparse.Namespace) -> AsyncIterator[Engine | Client]:
    """Open the model for the duration of the context. Raises `UsageError`, or the error of the engine or the client."""
    if args.url is not None:
        given = given_knobs(args, EngineConfig).keys() - {"progress"}
        if named := ", ".join(f"the model {args.model!r}" if name == "model" else flag(name) for name in sorted(given)):
            raise UsageError(f"{named} cannot be set for a server: leave it out, or leave out --url")
        from aengine.client import Client

        async with Client(args.url, args.api_key or os.environ.get("AENGINE_API_KEY") or None) as client:
            await client.served_model()
            yield client
        return
    config = read_knobs(args, EngineConfig)
    if sys.stderr.isatty():  # imports take seconds
        print(f"aengine: starting; the model is {config.model_name}", file=sys.stderr, flush=True)
    from aengine.engine import Engine

    async with Engine(config=config) as engine:
        yield engine
