"""The arguments of `aengine serve`. The server itself stands in `server.py`, whose imports take their time."""

from __future__ import annotations

import argparse

from aengine.cli.errors import UsageError
from aengine.cli.knobs import add_knobs, add_model, read_knobs
from aengine.config import EngineConfig, ListenConfig, ServerConfig

_EPILOG = """\
examples:
  aengine serve
  aengine serve /models/qwen3-8b --host 0.0.0.0 --port 9000 --served-model-name qwen
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
    add_model(parser)
    add_knobs(parser, ListenConfig, "where to listen")
    add_knobs(parser, ServerConfig, "the API")
    add_knobs(parser, EngineConfig, "the engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine = read_knobs(args, EngineConfig)
    server = read_knobs(args, ServerConfig)
    listen = read_knobs(args, ListenConfig)
    if listen.workers != 1:
        raise UsageError(
            f"--workers {listen.workers}: the engine is one process and one event loop, and a second worker would load "
            "the model a second time and know nothing of the first one's requests; leave it at 1, and start further "
            "servers on further ports for further GPUs"
        )
    from aengine.cli.serve.server import serve

    return serve(engine, server, listen)
