"""The demo model's tokenizer: byte-level BPE whose words are one token or pieces, alike after a space and without.

Copying a word from a sentence into JSON is then copying tokens. A frequent word is two tokens of the vocabulary: with
and without a space before it. Every other word is a space's token and short pieces without spaces. Ordinary BPE would
split " Anna" and "Anna" differently, and would create pieces that hardly ever occur.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bench.demo_model.chat_format import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN
from bench.demo_model.conversations import long_document, short_document
from bench.demo_model.pools import HELD_OUT_VALUES

VOCAB_SIZE = 4096
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)  # control: not part of the text
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # single tokens, but text
_SPLIT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{L})| ?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIECES = 512  # merges of letters
_LONGEST_PIECE = 3  # letters
_MARKS = 240  # runs of punctuation and spaces
_RARE = 5  # what occurs less often is no word


@dataclass(frozen=True, slots=True)
class Ids:
    """The token ids that training and decoding look at."""

    text_end: int
    turn_start: int
    turn_end: int
    assistant: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Ids:
        """Raises: KeyError if the tokenizer was not made here."""
        vocab = tokenizer.get_vocab()
        return cls(vocab[END_OF_TEXT], vocab["<|im_start|>"], vocab[END_OF_TURN], vocab["assistant"])


def _texts(seed: int, documents: int) -> Iterator[str]:
    """Return the texts for BPE: documents without their special tokens."""
    rng = Random(f"{seed} tokenizer")
    marks = re.compile("|".join(map(re.escape, (*SPECIAL, *TAGS))))
    for _ in range(documents):
        yield from marks.split(long_document(rng) if rng.random() < 0.2 else short_document(rng))


def _to_bytes() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _by_count(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda part: (-counts[part], part))


def _pieces(words: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The 256 bytes and the merges of letters, each word counted once."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = _to_bytes()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + _PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=_LONGEST_PIECE,
        show_progress=False,
    )
    bpe.train_from_iterator(words, trainer)
    model = json.loads(bpe.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def train_tokenizer(seed: int = 0, documents: int = 30_000) -> Tokenizer:
    """Train on freshly generated documents. The ids of `SPECIAL` and `TAGS` are the last ones, in that order."""
    normalizer, split, to_bytes = normalizers.NFC(), pre_tokenizers.Split(_SPLIT, "isolated"), _to_bytes()
    words: Counter[str] = Counter()  # without a space before them
    marks: Counter[str] = Counter()
    for text in _texts(seed, documents):
        for part, _ in split.pre_tokenize_str(normalizer.normalize_str(text)):
            word = part.removeprefix(" ")
            (words if word.isalpha() else marks)[word if word.isalpha() else part] += 1
    vocab, merges = _pieces(sorted(words))
    frequent = [mark for mark in _by_count(marks) if len(mark) > 1][:_MARKS]
    # A token that is never copied in training would never be written: held-out words are pieces, as any unseen word is.
    known = [word for word in _by_count(words) if words[word] >= _RARE and word.lower() not in HELD_OUT_VALUES]
    frequent += [part for word in known for part in (word, f" {word}")]
    whole = [to_bytes.pre_tokenize_str(part)[0][0] for part in frequent]
    new = [part for part in whole if part not in vocab]
    for part in new[: VOCAB_SIZE - len(SPECIAL) - len(TAGS) - len(vocab)]:
        vocab[part] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus is too small for {VOCAB_SIZE} tokens: got {tokenizer.get_vocab_size()}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in (*SPECIAL, *TAGS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
