"""The error for unknown flags, with the known one that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches

_LIKENESS = 0.7  # share of common letters from which on a flag is offered


def unknown_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """One sentence about the arguments that `parser`, that of a command, does not know."""
    argument = next((argument for argument in arguments if argument.startswith("-")), arguments[0])
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unknown argument {argument!r}; see {parser.prog} --help"
    options = parser._option_string_actions
    if close := get_close_matches(flag.replace("_", "-"), options, 1, _LIKENESS):
        return f"unknown flag {flag}; did you mean {close[0]}?"
    return f"unknown flag {flag}; see {parser.prog} --help"
