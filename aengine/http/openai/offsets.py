"""Where tokens begin in the text that an answer shows, for `text_offset`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection

from aengine.http.engine_like import TokenizerLike

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Offsets of one choice's tokens into its text, in characters; one call a token, in order.

    A token that goes on with a character begins where the character does, and one that is not shown adds nothing.
    hidden: special tokens that the output leaves out. echo: the prompt's text in front of the output, of `echoed`
    tokens; what the tokenizer put around it is not in it.
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
        start = self._at
        if self._echoed:
            self._at = self._behind_echoed(token_id, start)
            self._echoed -= 1
            if not self._echoed:
                self._at = len(self._echo)
                self._decoder.reset()
        elif token_id not in self._hidden:
            self._at += len(self._decoder.decode(self._bytes_of(token_id)))
        return start

    def _behind_echoed(self, token_id: int, start: int) -> int:
        text = self._decoder.decode(self._bytes_of(token_id))
        if not self._echo.startswith(text, start):
            if token_id in self._special_ids:
                return start
            text = text.removeprefix(" ") if start == 0 else text  # some tokenizers put a blank in front of a text
        return min(start + len(text), len(self._echo))
