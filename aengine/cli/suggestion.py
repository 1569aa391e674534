"""The errors for unknown commands and flags, with the known one that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from difflib import get_close_matches

_LIKENESS = 0.7  # share of common letters from which on a flag is offered
_LIKENESS_OF_COMMANDS = 0.5  # there are few, and `gen` can be one of them only


def unknown_command(name: str, commands: Collection[str]) -> str:
    """One sentence about a command that is none of these."""
    if close := get_close_matches(name, commands, 1, _LIKENESS_OF_COMMANDS):
        return f"unknown command {name!r}; did you mean {close[0]}?"
    return f"unknown command {name!r}; there are {', '.join(commands)}"


def unknown_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """One sentence about the arguments that `parser` does not know."""
    argument = next((argument for argument in arguments if argument.startswith("-")), arguments[0])
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unknown argument {argument!r}; see {parser.prog} --help"
    options = parser._option_string_actions
    if close := get_close_matches(flag.replace("_", "-"), options, 1, _LIKENESS):
        return f"unknown flag {flag}; did you mean {close[0]}?"
    return f"unknown flag {flag}; see {parser.prog} --help"
