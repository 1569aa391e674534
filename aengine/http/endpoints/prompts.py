"""Prompts of requests in their four spellings, split, truncated or turned into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from aengine.errors import InvalidRequestError
from aengine.http.engine_like import TokenizerLike

MAX_CHOICES = 1024  # of one request: prompts x n
MAX_ECHO = 2**25  # characters that `echo` may repeat in one answer, over all choices; whole ones hold them thrice

Prompt = str | list[int]


def split_prompts(prompt: str | Sequence[str | int | list[int]], n: int) -> list[Prompt]:
    """A request's prompts as a list, from a string, ids, strings or lists of ids; `n` choices are made of each.

    Raises `InvalidRequestError`.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # of a million ids, maybe: one pass, within C
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    several = cast("list[Prompt]", prompt)
    if kinds not in ({str}, {list}):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
        )
    if len(several) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"one request makes at most {MAX_CHOICES} choices, {len(several)} prompts with n = {n} "
            f"would make {len(several) * n}: send fewer prompts, or lower n",
            "prompt" if len(several) > MAX_CHOICES else "n",
        )
    return several


async def cut(prompt: Prompt, last: int | None, tokenizer: TokenizerLike) -> Prompt:
    """The last `last` tokens of the prompt; all of it, as it is, for None."""
    if last is None:
        return prompt
    ids = await tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return ids[-last:]


class EchoBudget:
    """Bounds what `echo` repeats in one answer: each prompt's text, `copies` times."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._characters = 0

    def add(self, text: str) -> None:
        """Count one more prompt. Raises `InvalidRequestError`."""
        self._characters += len(text) * self._copies
        if self._characters > MAX_ECHO:
            raise InvalidRequestError(
                f"echo would repeat {self._characters} characters and more, but an answer may repeat {MAX_ECHO}: "
                "lower n, or send fewer prompts at once",
                "echo",
            )


def text_of(prompt: Prompt, tokenizer: TokenizerLike) -> str:
    """The text of a prompt, which `echo` repeats; special tokens are written out only where the client wrote them."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False)
