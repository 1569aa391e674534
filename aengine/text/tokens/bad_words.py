"""Tokenizes bad words: finds the token sequences that write them."""

from __future__ import annotations

from collections.abc import Sequence

from anyio import to_thread

from aengine.errors import InvalidRequestError
from aengine.text.tokens.tokenizer import Tokenizer

MAX_TOKENS = 32  # tokens of one word; a row of the batch remembers that much of its output
_INLINE_WORDS = 16


async def banned_sequences(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that write each word at the start of a text and after a space.

    Many words, and words that may take long, are tokenized in a thread. Other sequences that write a word stay allowed,
    as in vLLM. Sequences with ids of `vocab_size` or more are left out: no output can hold them. Raises
    `InvalidRequestError` for a word of too many tokens.
    """

    def work() -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(tokenizer.encode_now(text, add_special_tokens=False))
                if len(ids) > MAX_TOKENS:
                    raise InvalidRequestError(
                        f"{word!r} has {len(ids)} tokens; the limit for a bad word is {MAX_TOKENS}", "bad_words"
                    )
                if ids and max(ids) < vocab_size:
                    found[ids] = None
        return tuple(found)

    return work() if tokenizer.is_quick and len(words) <= _INLINE_WORDS else await to_thread.run_sync(work)
