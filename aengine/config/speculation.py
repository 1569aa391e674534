"""The knob `speculation`: which kind of proposer drafts tokens, and from which weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from aengine.errors import ConfigError

MAX_DRAFT_TOKENS = 16

Kind = Literal["auto", "off", "mtp", "ngram", "eagle3", "dflash", "draft"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_WITH_PATH = frozenset({"eagle3", "dflash", "draft"})


class Speculation(msgspec.Struct, frozen=True):
    """The knob's value.

    - `auto`: the engine chooses.
    - `off`: no token is drafted.
    - `mtp`: the checkpoint's own layers for multi-token prediction draft.
    - `ngram`: drafts continue an earlier occurrence of the newest tokens in the same sequence.
    - `eagle3`, `dflash`: a head at `path` drafts from the model's hidden states.
    - `draft`: a smaller model at `path` drafts. It has the same vocabulary.
    """

    kind: Kind
    path: str | None = None  # a folder or a Hugging Face id

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Return the value of the knob's text. Raises `ValueError`, whose message says what to write."""
        name, equals, path = (part.strip() for part in text.partition("="))
        kind = next((kind for kind in _KINDS if kind == name.lower()), None)
        if kind is None:
            raise ValueError(f"must be one of {_forms(_KINDS)}")
        if kind not in _WITH_PATH:
            if equals:
                raise ValueError(f"{kind} takes no path; write {kind} alone")
            return cls(kind)
        if not path:
            raise ValueError(f"{kind} needs the folder or the Hugging Face id of its weights; write {kind}=PATH")
        return cls(kind, path)


def _forms(kinds: Iterable[Kind]) -> str:
    """Return how the knob is written for these kinds."""
    return ", ".join(f"{kind}=PATH" if kind in _WITH_PATH else kind for kind in kinds)


def read_speculation(text: str) -> Speculation:
    """Return the value of the knob's text for an engine that starts.

    Raises `ConfigError` if the text is malformed.
    """
    try:
        return Speculation.parse(text)
    except ValueError as error:
        raise ConfigError(f"speculation: {error}, got {text!r}") from None


def chosen_line(proposer: str, reason: str, draft_tokens: int = 0) -> str:
    """Return the line of the start-up log about the proposer.

    Args:
        proposer: the kind that runs, or `off`.
        reason: why it was chosen, such as "the checkpoint has 1 MTP layer".
        draft_tokens: the most tokens that a step drafts for a sequence.
    """
    if proposer == "off":
        return f"speculation: off ({reason})"
    return f"speculation: {proposer}, up to {draft_tokens} drafts a step for each sequence ({reason})"
