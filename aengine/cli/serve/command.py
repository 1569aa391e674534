"""The command `aengine serve`. The server is in `server.py`, whose imports take seconds."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress

from aengine.cli.errors import UsageError
from aengine.cli.serve.flags import add_flags, read_flags
from aengine.config import EngineConfig, ServerConfig

_EPILOG = """\
examples:
  aengine serve
  aengine serve /models/qwen3-8b --host 0.0.0.0 --served-model-name qwen big
  AENGINE_MAX_NUM_SEQS=64 aengine serve Qwen/Qwen3-8B

Every flag is also an environment variable; the flag wins. The first Ctrl-C (SIGINT, SIGTERM, SIGHUP) refuses new
requests and lets running answers finish. The second one ends them.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API and as aengine's own",
        description="Serve a model over HTTP, as OpenAI's API and as aengine's own.",
        epilog=_EPILOG,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine, server, listen = read_flags(args)
    _check_names(engine, server)
    if listen.workers != 1:
        raise UsageError(
            f"--workers {listen.workers}: the engine is one process and one event loop; a second worker would load the "
            "model a second time and share no requests; leave it at 1, and start another server on another port for "
            "more GPUs"
        )
    with suppress(OSError):  # the reader of the log may have left; unbuffered, so that no later flush can fail
        os.write(2, f"aengine: starting; the model is {engine.model_name}\n".encode())  # imports take seconds
    from aengine.cli.serve.server import serve

    return serve(engine, server, listen)


def _check_names(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise `UsageError` if the model was read as one more of its served names, because it comes after them."""
    *others, last = server.served_model_name or ("",)
    if engine.model is None and others and "/" in last:
        raise UsageError(
            f"--served-model-name takes every word after it, also {last!r}, and no model is given: write the model "
            "first, or --model"
        )
