"""The demo model's tokenizer: byte-level BPE as Qwen's, trained on the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bench.demo_model.chat_format import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN
from bench.demo_model.conversations import long_document, short_document

VOCAB_SIZE = 4096
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)  # control: not part of the text
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # single tokens, but text
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Ids:
    """The token ids that training and decoding look at."""

    text_end: int
    turn_start: int
    turn_end: int
    assistant: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Ids:
        """Raises `KeyError` where the tokenizer is not one of ours."""
        vocab = tokenizer.get_vocab()
        return cls(vocab[END_OF_TEXT], vocab["<|im_start|>"], vocab[END_OF_TURN], vocab["assistant"])


def _texts(seed: int, documents: int) -> Iterator[str]:
    rng = Random(f"{seed} tokenizer")
    for _ in range(documents):
        text = long_document(rng) if rng.random() < 0.2 else short_document(rng)
        for token in (*SPECIAL, *TAGS):
            text = text.replace(token, "\n")  # they never go through BPE
        yield text


def train_tokenizer(seed: int = 0, documents: int = 60_000) -> Tokenizer:
    """Train on freshly generated documents. The ids of `SPECIAL` and `TAGS` are the last ones, in that order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, documents), trainer)
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
