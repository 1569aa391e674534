"""The help of a command: `--help` shows one screen with the common flags, `--help-all` shows all flags."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from aengine.cli.errors import UsageError

_WIDTH = 80
_SWITCH_VALUES = {"true": True, "1": True, "false": False, "0": False}
_COLUMN = 30  # the descriptions begin here
_COMMON = {  # the arguments that --help shows, by command
    "serve": (
        "model",
        "--host",
        "--port",
        "--api-keys",
        "--served-model-name",
        "--config",
        "--tensor-parallel-size",
        "--max-model-len",
        "--max-num-seqs",
        "--gpu-memory-utilization",
        "--quantization",
        "--kv-cache-dtype",
        "--lora",
    ),
    "chat": (
        "model",
        "--url",
        "--api-key",
        "--system",
        "--image",
        "--max-tokens",
        "--temperature",
        "--adapter",
        "--max-model-len",
        "--quantization",
    ),
    "generate": (
        "input",
        "--output",
        "--text",
        "--image",
        "--model",
        "--url",
        "--api-key",
        "--max-tokens",
        "--temperature",
        "--concurrency",
        "--token-ids",
        "--quantization",
    ),
}


class CommandParser(argparse.ArgumentParser):
    """A parser whose --help fits on one screen, and whose --help-all shows every flag."""

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, "add_help": False}
        super().__init__(**settings)
        self.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="the common flags")
        self.add_argument("--help-all", action="help", help="every flag, with its variable")

    def shorten_usage(self) -> None:
        """Show only positional arguments in the usage. Call it after all arguments are added."""
        positional = [f" [{action.metavar}]" for action in self._actions if not action.option_strings]
        self.usage = f"%(prog)s{''.join(positional)} [FLAGS]"

    def plain_switches(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yield the arguments with `--switch=false` written as `--no-switch`, and `--switch=true` as `--switch`.

        argparse refuses values of switches. A false switch that has no opposite is left out.
        """
        for index, argument in enumerate(arguments):
            if argument == "--":
                yield from arguments[index:]
                return
            name, equals, value = argument.partition("=")
            action = self._option_string_actions.get(name)
            if not equals or not isinstance(action, (argparse.BooleanOptionalAction, argparse._StoreTrueAction)):
                yield argument
            elif value.lower() not in _SWITCH_VALUES:
                raise UsageError(f"{name} is a switch: it takes true or false, not {value!r}")
            elif _SWITCH_VALUES[value.lower()]:
                yield name
            else:
                is_off = name.startswith("--no-")
                yield from (other for other in action.option_strings if other.startswith("--no-") != is_off)

    def format_short_help(self) -> str:
        """Return the help that fits on one screen."""
        named = {name: action for action in self._actions for name in (action.option_strings or [action.dest])}
        actions = [named[name] for name in (*_COMMON[self.prog.split()[-1]], "--help-all")]
        examples = (self.epilog or "").partition("examples:")[2].partition("\n\n")[0].rstrip()
        return "\n".join(
            [
                self.format_usage().rstrip(),
                "",
                textwrap.fill(self.description or "", _WIDTH),
                "",
                *map(_line, actions),
                "",
                f"examples:{examples}",
                "",
            ]
        )


class _ShortHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_short_help(), end="")
        parser.exit()


def _line(action: argparse.Action) -> str:
    """Return one line about an argument, with the first clause of its help."""
    name = next((option for option in action.option_strings if option.startswith("--")), "")
    metavar = str(action.metavar or "") if action.nargs != 0 else ""
    left = f"  {name} {metavar}" if name else f"  {metavar}"
    if len(left) >= _COLUMN:  # many choices
        left = f"  {name} {'N' if '|1|' in metavar else 'TEXT'}"
    text = re.split(r";|: | \(", str(action.help))[0].strip()
    if _COLUMN + len(text) > _WIDTH:
        text = text.rpartition(", ")[0]
    return f"{left:<{_COLUMN}}{text}".rstrip()
