"""Usage, and logprobs in the formats of OpenAI's two endpoints."""

from __future__ import annotations

import asyncio
import codecs
import math
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from aengine.http.engine_like import TokenizerLike
from aengine.http.streams.document import encoded_list
from aengine.http.streams.fragments import SLICE
from aengine.types import TokenLogprob, TopLogprob, Usage

_new_decoder = codecs.getincrementaldecoder("utf-8")
_MOST_DECOMPOSED = 4  # characters of a text that normalization makes one character of


class TextOffsets:
    """Offsets of one choice's tokens into its text, in characters. `next` is called for each token in order.

    A character may have several tokens; all of them have the character's offset. A hidden token adds no text.

    hidden: special tokens that are left out of the output.
    echo: the prompt's text before the output, as it was sent: without the special tokens that the tokenizer adds, and
    not normalized.
    echoed: the number of the prompt's tokens.
    """

    def __init__(self, tokenizer: TokenizerLike, hidden: Collection[int], echo: str = "", echoed: int = 0) -> None:
        self._bytes_of: Callable[[int], bytes] = tokenizer.token_bytes
        self._special_ids = tokenizer.special_ids
        self._hidden = hidden
        self._echo = echo
        self._echoed = echoed
        self._decoder = _new_decoder("replace")
        self._at = 0

    def next(self, token_id: int) -> int:
        """Return the offset of the next token."""
        if self._echoed:
            broken, text = self._decode(token_id)
            start = self._at + broken
            self._at = self._after_echoed(token_id, start, text)
            self._echoed -= 1
            if not self._echoed:
                self._at = len(self._echo)
                self._decoder.reset()
            return start
        if token_id in self._hidden:
            return self._at
        broken, text = self._decode(token_id)
        start = self._at + broken
        self._at = start + len(text)
        return start

    def _decode(self, token_id: int) -> tuple[int, str]:
        """Return how many characters the tokens before left broken, and the token's text as far as it is known.

        A character is broken if this token does not continue it. The text shows a replacement character for it.
        """
        own = self._bytes_of(token_id)
        before = self._decoder.getstate()[0]
        first = self._decoder.decode(own[:1])
        if not before or not first:
            return 0, first + self._decoder.decode(own[1:])
        # The first byte either completes the character, or it breaks it and begins another.
        broken = len(first) - (0 if self._decoder.getstate()[0] else 1)
        return broken, first[broken:] + self._decoder.decode(own[1:])

    def _after_echoed(self, token_id: int, start: int, text: str) -> int:
        if not self._echo.startswith(text, start):
            if token_id in self._special_ids:
                return start
            if (end := self._end_before_normalization(start, text)) is not None:
                return end
            bare = text.removeprefix(" ")  # some tokenizers add a space to a text's first word
            text = bare if start == 0 or self._echo.startswith(bare, start) else text
        return min(start + len(text), len(self._echo))

    def _end_before_normalization(self, start: int, text: str) -> int | None:
        """Return the end of the echoed characters from `start` on that Unicode normalization turns into the text.

        Returns None if there are none.
        """
        written = self._echo[start : start + _MOST_DECOMPOSED * len(text)]
        if unicodedata.is_normalized("NFKC", written):
            return None
        for end in range(1, len(written) + 1):
            if any(unicodedata.normalize(form, written[:end]) == text for form in ("NFC", "NFKC")):
                return start + end
        return None


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the `usage` of an answer. reasoning_tokens: the tokens of thoughts; None if they are not counted."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def _name(one: TokenLogprob | TopLogprob, as_id: bool) -> str:
    """Return the token as logprobs show it. as_id: in vLLM's format `token_id:5`."""
    return f"token_id:{one.token_id}" if as_id else one.token


class ChatLogprobs:
    """Logprobs of `/v1/chat/completions`: a list of tokens under `content`."""

    def __init__(self, bytes_of: Callable[[int], bytes], as_ids: bool = False) -> None:
        """bytes_of: returns a token's bytes; a token that is a part of a character has no text."""
        self._bytes_of = bytes_of
        self._as_ids = as_ids

    def body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {"content": [self._with_top(one) for one in logprobs]}

    async def encoded_body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """Return the body for a whole answer, encoded in slices."""
        return None if logprobs is None else {"content": await encoded_list(logprobs, self._with_top)}

    def _with_top(self, one: TokenLogprob) -> dict[str, Any]:
        return {**self._candidate(one), "top_logprobs": [self._candidate(top) for top in one.top]}

    def _candidate(self, one: TokenLogprob | TopLogprob) -> dict[str, Any]:
        own = self._bytes_of(one.token_id) if "\ufffd" in one.token else one.token.encode()
        return {"token": _name(one, self._as_ids), "logprob": one.logprob, "bytes": list(own)}


class CompletionLogprobs:
    """Logprobs of `/v1/completions`: parallel lists, with text offsets that continue from chunk to chunk."""

    def __init__(self, offsets: TextOffsets, as_ids: bool) -> None:
        self._offsets = offsets
        self._as_ids = as_ids
        self._waiting: list[
            tuple[TokenLogprob, int]
        ] = []  # tokens, with their offsets, that begin after the text so far

    def body(self, logprobs: Sequence[TokenLogprob] | None, length: int, *, ends: bool) -> dict[str, Any] | None:
        """Return the logprobs of a chunk; None if there are none to send.

        A token that begins after the text so far waits for a later chunk, because a stop string may remove it.

        length: the length of the text so far.
        ends: whether the text is complete. Tokens removed by a stop string get the end of the text as their offset.
        """
        if logprobs is None and not self._waiting:
            return None
        found = self._waiting + [(one, self._offsets.next(one.token_id)) for one in logprobs or ()]
        ready = len(found) if ends else sum(offset <= length for _, offset in found)
        found, self._waiting = found[:ready], found[ready:]
        if not found and self._waiting:
            return None
        scores = [one for one, _ in found]
        offsets = [min(offset, length) for _, offset in found]
        return {**self._columns(scores, offsets), "top_logprobs": [self._by_text(one) for one in scores]}

    async def encoded_body(self, logprobs: Sequence[TokenLogprob] | None, end: int) -> dict[str, Any] | None:
        """Return the body for a whole answer with a text of length `end`, made in slices."""
        if logprobs is None:
            return None
        columns = self._columns((), ())
        for start in range(0, len(logprobs), SLICE):
            if start:
                await asyncio.sleep(0)
            some = logprobs[start : start + SLICE]
            offsets = [min(self._offsets.next(one.token_id), end) for one in some]
            for name, values in self._columns(some, offsets).items():
                columns[name] += values
        return {**columns, "top_logprobs": await encoded_list(logprobs, self._by_text)}

    def _columns(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, list[Any]]:
        return {
            "tokens": [_name(one, self._as_ids) for one in logprobs],
            "token_logprobs": [None if math.isnan(one.logprob) else one.logprob for one in logprobs],
            "text_offset": list(offsets),
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float] | None:
        """Return logprobs by token text: the candidates and, as in OpenAI's API, always the sampled token.

        If two tokens have the same text, the likelier one is shown. None for a prompt's first token.
        """
        if math.isnan(one.logprob):
            return None
        found: dict[str, float] = {}
        candidates: tuple[TokenLogprob | TopLogprob, ...] = (*one.top, one)
        for candidate in candidates:
            found.setdefault(_name(candidate, self._as_ids), candidate.logprob)
        return found


class CompletionForm(NamedTuple):
    """How the choices of one completion are shown, by the index of the choice."""

    logprobs: Callable[[int], CompletionLogprobs]
    prompt_ids: Callable[[int], Sequence[int]] | None  # None: the request does not ask for ids

    def ids_of_prompt(self, index: int) -> dict[str, Any]:
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids(index)}
