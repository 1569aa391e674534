"""Unknown flags, told together with the known one that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches

_LIKENESS = 0.7  # share of common letters from which on a flag is offered


def unknown_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """One sentence about what `parser`, that of a command, could not use."""
    word = next((word for word in words if word.startswith("-")), words[0])
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unknown argument {word!r}; see {parser.prog} --help"
    known = parser._option_string_actions
    if close := get_close_matches(flag.replace("_", "-"), known, 1, _LIKENESS):
        return f"unknown flag {flag}; did you mean {close[0]}?"
    return f"unknown flag {flag}; see {parser.prog} --help"
