"""The arguments of `aengine serve`. The server itself stands in `server.py`, whose imports take their time."""

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

Every flag is an environment variable too; the flag wins. The first Ctrl-C (SIGINT, SIGTERM, SIGHUP) refuses new work
and lets running answers finish, the second one ends them.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API and as aengine's own",
        description="Serve a model over HTTP, as OpenAI's API and as aengine's own.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine, server, listen = read_flags(args)
    _check_names(engine, server)
    if listen.workers != 1:
        raise UsageError(
            f"--workers {listen.workers}: the engine is one process and one event loop, and a second worker would load "
            "the model a second time and know nothing of the first one's requests; leave it at 1, and start further "
            "servers on further ports for further GPUs"
        )
    with suppress(OSError):  # nobody may read the log; unbuffered, so that nothing is left to be flushed at the end
        os.write(2, f"aengine: starting; the model is {engine.model_name}\n".encode())  # imports take seconds
    from aengine.cli.serve.server import serve

    return serve(engine, server, listen)


def _check_names(engine: EngineConfig, server: ServerConfig) -> None:
    """Refuse a model that was taken for one more of its names, because it stands after them."""
    *others, last = server.served_model_name or ("",)
    if engine.model is None and others and "/" in last:
        raise UsageError(
            f"--served-model-name takes every name that follows, {last!r} too, and no model is named: write the model "
            "first, or --model"
        )
