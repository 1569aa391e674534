"""Tokenizes bad_words: the token sequences that write them."""

from __future__ import annotations

from collections.abc import Sequence

from anyio import to_thread

from aengine.errors import InvalidRequestError
from aengine.text.tokens.tokenizer import Tokenizer

MAX_TOKENS = 32  # of one word: what a row must remember of its output
_INLINE_WORDS = 16


async def banned_sequences(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word, at the start of a text and after a space; many words, and those
    that may take long, are tokenized in a thread.

    Other ways to spell a word with tokens stay open, as they do in vLLM. vocab_size: the model's; sequences with ids
    beyond it are left out, as no output can hold them. Raises `InvalidRequestError`.
    """

    def work() -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(tokenizer.encode_now(text, add_special_tokens=False))
                if len(ids) > MAX_TOKENS:
                    raise InvalidRequestError(
                        f"{word!r} has {len(ids)} tokens; a bad word may have {MAX_TOKENS}", "bad_words"
                    )
                if ids and max(ids) < vocab_size:
                    found[ids] = None
        return tuple(found)

    return work() if tokenizer.is_quick and len(words) <= _INLINE_WORDS else await to_thread.run_sync(work)
