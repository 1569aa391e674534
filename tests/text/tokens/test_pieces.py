"""The bytes of a vocabulary's tokens: computed at once, they equal those computed one by one."""

from __future__ import annotations

import random

from tokenizers import pre_tokenizers

from aengine.text.tokens.pieces import PieceTable, rules_of

RULES = rules_of({"type": "ByteLevel"})
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# A token with a character outside the alphabet is its own UTF-8.
FOREIGN = [
    "",
    " ",
    "a b",
    "\n",
    "Ġ Ġ",
    "\x7f",
    "\xad",
    "\u0144",
    "\ufffd",
    "\ufffe\uffff",
    "<|im_end|>",
    "👋",
    "Ġ👋",
    "\0",
]


def test_all_tokens_at_once_have_the_bytes_of_each_alone() -> None:
    assert RULES is not None
    assert RULES.pieces is not None
    rng = random.Random(0)
    tokens = [*ALPHABET, *("".join(rng.choices(ALPHABET, k=rng.randint(1, 7))) for _ in range(2000)), *FOREIGN]
    rng.shuffle(tokens)
    assert RULES.pieces(tokens) == [RULES.piece(token) for token in tokens]
    assert RULES.pieces([]) == []


def test_tokens_that_are_text_by_themselves_are_told_from_those_that_are_not() -> None:
    assert RULES is not None
    tokens = dict(enumerate(["Ġa", "ï¿½", "é", "Ã©", "Ã", "ï¿", "\ufffd"]))
    table = PieceTable(RULES, tokens, frozenset({0}))
    assert table.shown == {0: " a", 1: "\ufffd", 3: "é", 6: "\ufffd"}
    assert table.partial == {2: b"\xe9", 4: b"\xc3", 5: b"\xef\xbf"}
    assert table.skipped.keys() == {1, 3, 6}
    assert table.distinct == {table.bytes_of(token_id) for token_id in tokens}
