"""Errors that end a command, and their messages, which suggest what was probably meant."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from aengine.config.other_names import nearest_knob, remedy

_COMMAND_SIMILARITY = 0.5  # low, because there are few commands: `gen` can only mean one
_NUMBER = re.compile(r"-\.?\d")
_MODEL = re.compile(r"[\w.\-]+/[\w.\-]+")


class CommandError(Exception):
    """Ends the command with one sentence on standard error, and exit status 1."""


class UsageError(Exception):
    """Ends the command with one sentence about its arguments, and exit status 2."""


def unknown_command(name: str, commands: Collection[str]) -> str:
    """Return the message about an unknown command."""
    if name in ("help", "version"):
        return f"unknown command {name!r}; did you mean aengine --{name}?"
    if close := get_close_matches(name, commands, 1, _COMMAND_SIMILARITY):
        return f"unknown command {name!r}; did you mean {close[0]}?"
    if _is_model(name):
        return f"unknown command {name!r}; did you mean aengine serve {shlex.quote(name)}?"
    return f"unknown command {name!r}; there are {', '.join(commands)}"


def flag_before_command(argument: str, commands: Collection[str]) -> str:
    """Return the message about an unknown flag in the place of a command."""
    flag = argument.partition("=")[0]
    if close := get_close_matches(flag, ("--help", "--version"), 1):
        return f"unknown flag {flag}; did you mean {close[0]}?"
    return f"flag {flag} has no command before it; write aengine {'|'.join(commands)} {flag}"


def unknown_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """Return one message about all unknown arguments."""
    flags = [argument.partition("=")[0] for argument in arguments if _is_flag(argument)]
    if not flags:
        hint = f"see {parser.prog} --help"
        if _is_model(arguments[0]) and "model" not in {action.dest for action in parser._get_positional_actions()}:
            hint = f"a model is named with --model {shlex.quote(arguments[0])}"
        return f"unknown argument {arguments[0]!r}; {hint}"
    hints = [_suggestion(flag, parser._option_string_actions) for flag in dict.fromkeys(flags)]
    if len(hints) == 1:
        return f"unknown flag {flags[0]}; {hints[0] or f'see {parser.prog} --help-all'}"
    shown = [f"{flag} ({hint})" if hint else flag for flag, hint in zip(dict.fromkeys(flags), hints)]
    return f"unknown flags {', '.join(shown)}; see {parser.prog} --help-all"


def no_prompts(text: str) -> str:
    """Return the message about a file of prompts that does not exist."""
    if _is_model(text):
        return f"{text!r} is no file of prompts; a model is named with --model {shlex.quote(text)}"
    return (
        f"there is no file {text!r}; prompts come from a file or a pipe: echo {_quoted(text)} | aengine generate --text"
    )


def no_model(text: str) -> str | None:
    """Return the message about a prompt in the place of a model's name; None if it may be a name."""
    if not re.search(r"[\s?!]", text.strip()) or os.path.exists(text):
        return None
    return f"{text!r} is in the place of the model's name; to send it: echo {_quoted(text)} | aengine chat"


def _suggestion(flag: str, options: Collection[str]) -> str:
    """Return what to write in place of an unknown flag; empty if no known name is similar."""
    name = flag.lstrip("-")
    if advice := remedy(name):
        return advice
    known = [option[2:].replace("-", "_") for option in options if option.startswith("--")]
    if meant := nearest_knob(name, known):
        knob, off = meant
        option = f"--{'no-' if off else ''}{knob.replace('_', '-')}"
        if option in options:
            return f"did you mean {option}?"
    return ""


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and len(argument) > 1 and not _NUMBER.match(argument)


def _is_model(text: str) -> bool:
    """Return whether the text is the folder of a checkpoint or looks like owner/name."""
    return os.path.isfile(os.path.join(text, "config.json")) or _MODEL.fullmatch(text) is not None


def _quoted(text: str) -> str:
    return f'"{text}"' if not re.search(r'["$`\\!]', text) else shlex.quote(text)
