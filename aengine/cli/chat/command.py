"""The command `aengine chat`."""

from __future__ import annotations

import argparse

from aengine.cli.errors import UsageError, no_model
from aengine.cli.images import add_images, read_images
from aengine.cli.knobs import add_model
from aengine.cli.model import add_model_or_server
from aengine.cli.sampling import add_sampling, read_sampling

_EPILOG = """\
examples:
  aengine chat
  aengine chat Qwen/Qwen3-8B --temperature 0.7 --system "Answer in one line."
  aengine chat Qwen/Qwen3.5-4B --image receipt.png
  aengine chat --url http://localhost:8000

In the shell, /help shows the commands. Ctrl-C stops an answer, Ctrl-D leaves.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal.",
        epilog=_EPILOG,
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    add_images(parser, "that goes with the first message")
    add_sampling(parser, without=("n", "logprobs", "prompt_logprobs", "speculation"))  # the last is a knob
    add_model_or_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if wrong := no_model(getattr(args, "model", "")):
        raise UsageError(wrong)
    sampling = read_sampling(args)
    images = read_images(args)
    from aengine.cli.chat.terminal import chat

    return chat(args, sampling, images)
