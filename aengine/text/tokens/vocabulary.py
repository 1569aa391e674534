"""The tokens of a tokenizer by their ids, and what they add to a text."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from aengine.text.tokens.backend import decoder_of
from aengine.text.tokens.bounds import longest_token_bytes
from aengine.text.tokens.pieces import PieceTable, rules_of


class Vocabulary:
    """All tokens of a tokenizer. Making it holds the GIL for 2 us per token.

    tokens: ids to tokens, as the vocabulary writes them.
    size: all ids are smaller. There may be gaps.
    pieces: the text of each token. None means that the decoder does not read tokens one by one.
    longest: the number of bytes of the longest token. None means that a text's length is no bound for its tokens.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        tokens = self.tokens = _tokens_of(backend)
        self.size = max(tokens, default=-1) + 1
        rules = rules_of(decoder_of(backend))
        self.pieces = None if rules is None else PieceTable(rules, tokens, special_ids)
        self.longest = longest_token_bytes(backend, self.pieces)


def _tokens_of(backend: Backend) -> dict[int, str]:
    """Return the tokens by their ids.

    They are looked up one by one, so that other threads get the GIL in between. `get_vocab` holds it for 1 us per token
    at once. It is called only if ids have gaps.
    """
    count = backend.get_vocab_size(with_added_tokens=True)
    look_up = backend.id_to_token
    tokens = {token_id: token for token_id in range(count) if (token := look_up(token_id)) is not None}
    if len(tokens) < count:
        tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=False).items()}
    tokens.update({token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()})
    return tokens
