"""Runs the chat shell on the terminal, with the model that the arguments name."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from aengine.cli.chat.backends import ChatBackend, EngineBackend, ServerBackend
from aengine.cli.chat.shell import Shell
from aengine.cli.chat.terminal import line_reader, shows_styles
from aengine.cli.model import opened_model
from aengine.client import Client


def chat(args: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Run the chat shell until the user leaves it."""
    asyncio.run(_chat(args, sampling))
    return 0


async def _chat(args: argparse.Namespace, sampling: dict[str, Any]) -> None:
    async with opened_model(args) as model:
        if isinstance(model, Client):
            backend: ChatBackend = ServerBackend(model, args.adapter)
            served_name = f"{await model.served_model()} on {model.base_url}"
        else:
            backend, served_name = EngineBackend(model, args.adapter), f"{model.model_name} in this process"
        shell = Shell(backend, sys.stdout, sampling, args.system, dim=shows_styles(sys.stdout))
        with line_reader() as read:
            if sys.stdin.isatty():
                print(f"{served_name}; /help tells the commands, Ctrl-C stops an answer, Ctrl-D leaves")
            await shell.run(read)
