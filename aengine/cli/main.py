"""The entry point `aengine`: chooses the command, and turns errors into exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import aengine
from aengine.cli.chat import command as chat_command
from aengine.cli.errors import CommandError, UsageError, flag_before_command, unknown_arguments, unknown_command
from aengine.cli.generate import command as generate_command
from aengine.cli.help import CommandParser
from aengine.cli.serve import command as serve_command
from aengine.errors import AengineError
from aengine.process.standard_streams import LossyStream

_DESCRIPTION = "An LLM inference engine in one process: serve a model, talk to it, or run prompts through it."
_EPILOG = """\
examples:
  aengine serve                        the demo model, on http://127.0.0.1:8000
  aengine serve Qwen/Qwen3-8B --port 9000
  aengine chat                         talk to the demo model, without a server
  aengine chat --url http://127.0.0.1:8000
  aengine generate prompts.jsonl > results.jsonl

`aengine COMMAND --help` shows the common flags, `--help-all` all of them. Exit status: 0 success, 1 failure, 2 wrong
arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout:  # None: closed before the process began
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has left, as `| head` does: not an error
        LossyStream(sys.stdout).discard()
        return 1


def _run(argv: Sequence[str]) -> int:
    parser, commands = _parser()
    try:
        if not argv:
            parser.print_help()
            return 0
        first, *rest = argv
        if first in commands:
            rest = list(commands[first].plain_switches(rest))
        elif not first.startswith("-"):
            raise UsageError(unknown_command(first, commands))
        elif first.partition("=")[0] not in parser._option_string_actions:
            raise UsageError(flag_before_command(first, commands))
        args, unknown = parser.parse_known_args([first, *rest])
        if unknown:
            raise UsageError(unknown_arguments(args.parser, unknown))
        return int(args.run(args))
    except SystemExit as ended:  # raised by argparse
        return ended.code if isinstance(ended.code, int) else 1
    except UsageError as error:
        print(f"aengine: {error}", file=sys.stderr)
        return 2
    except (CommandError, AengineError) as error:
        print(f"aengine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, CommandParser]]:
    """Return the parser, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="aengine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aengine {aengine.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in (serve_command, chat_command, generate_command):
        command.add(commands)
    for sub_parser in commands.choices.values():
        sub_parser.set_defaults(parser=sub_parser)
        sub_parser.shorten_usage()
    return parser, commands.choices
