"""Detokenizes one id at a time and never emits half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from aengine.text.tokens.pieces import leading

if TYPE_CHECKING:
    from aengine.text.tokens.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 16  # a character has at most 4 bytes; a longer run of ids without text completes none


class Detokenizer:
    """Turns the ids of one output into text as they come, in O(1) per token.

    The texts of `feed`, followed by that of `flush`, join to exactly what `Tokenizer.decode` makes of all ids. Bytes of
    an unfinished character are held back. So no piece holds U+FFFD unless the whole text does. Ids outside the
    vocabulary add nothing.

    prompt_ids: the ids before the output. The text is that of prompt and output together, without the prompt's. This
    matters only to decoders that treat the start of a text in their own way, such as those that strip one space. A
    character that begins in the prompt's last bytes is not completed by the output.

    shown_special_ids: special tokens that `skip_special_tokens` does not skip.
    """

    __slots__ = ("_first", "_held", "_hidden", "_lead", "_plain", "_table", "_texts", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown_special_ids: Sequence[int] = (),
    ) -> None:
        table = tokenizer.pieces
        self._table = table
        self._hidden = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset()
        self._held = b""  # the beginning of a character, at most 3 bytes
        self._window: _Window | None = None
        self._first = False  # whether the next token with text is the first of the whole text
        self._lead = 0  # how many characters may still be stripped from the start
        if table is None:
            self._texts: dict[int, str] = {}
            self._window = _Window(tokenizer, self._hidden, prompt_ids)
            self._plain = False
            return
        self._texts = table.skipped if skip_special_tokens else table.shown
        self._first = table.rules.first_piece is not None
        self._lead = table.rules.lead_count
        self._plain = not self._first and not self._lead
        for token_id in prompt_ids:
            if self._plain:
                break
            self._feed_slowly(token_id)
            self._plain = not self._first and not self._lead
        self._held = b""

    def feed(self, token_id: int) -> str:
        """Return the text that this id completes, possibly empty."""
        if self._plain:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        return self._feed_slowly(token_id)

    def flush(self) -> str:
        """Return the text that is held back. Incomplete characters become U+FFFD. Call once, after the last id."""
        if self._window is not None:
            return self._window.flush()
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")

    def _feed_slowly(self, token_id: int) -> str:
        """Do the work of `feed` for ids inside a character or at the text's start, and for special or unknown ids."""
        table = self._table
        if table is None:
            return self._window.feed(token_id) if self._window is not None else ""
        if self._first:
            first = table.first_bytes(token_id, self._hidden)
            if first is None:
                return ""
            self._first = False
            data = first
        else:
            data = b"" if token_id in self._hidden else table.bytes_of(token_id)
        data = self._held + data
        text, consumed = utf_8_decode(data, "replace", False)
        self._held = data[consumed:]
        if self._lead and text:
            taken = leading(text, table.rules.lead, self._lead)
            self._lead = self._lead - taken if taken == len(text) else 0
            text = text[taken:]
        self._plain = not (self._held or self._first or self._lead)
        return text


class _Window:
    """Detokenizes with decoders that cannot decode one token at a time.

    It decodes the last few tokens with and without the newest one.

    The text is exact if the decoder depends on neighbouring tokens only. With any decoder, at most `_MAX_HELD_TOKENS`
    ids are held back, and each id costs at most that much decoding.
    """

    __slots__ = ("_decode", "_ids", "_is_text", "_prefix", "_read")

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int], prompt_ids: Sequence[int]) -> None:
        def leaves_trace(token_id: int) -> bool:
            return tokenizer.is_token(token_id) and token_id not in hidden

        def decode(token_ids: list[int]) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=False)  # `feed` has removed the hidden ones

        self._is_text: Callable[[int], bool] = leaves_trace
        self._decode: Callable[[list[int]], str] = decode
        tail = [token_id for token_id in prompt_ids[-_MAX_HELD_TOKENS:] if leaves_trace(token_id)]
        self._ids = tail  # the ids of the window
        self._read = len(tail)  # how many of them are in the text already
        self._prefix = decode(tail)  # the window's text that has been returned

    def feed(self, token_id: int) -> str:
        if not self._is_text(token_id):
            return ""
        self._ids.append(token_id)
        full = len(self._ids) - self._read >= _MAX_HELD_TOKENS
        text = self._decode(self._ids)
        if not full and (text.endswith("\ufffd") or len(text) <= len(self._prefix)):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _advance(self, text: str) -> str:
        new = self._ids[self._read :]
        # If the decoder rewrites text that has been returned, go on with the new ids alone.
        added = text[len(self._prefix) :] if text.startswith(self._prefix) else self._decode(new)
        self._ids = new
        self._read = len(new)
        self._prefix = self._decode(new)
        return added
