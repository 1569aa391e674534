"""Small tokenizers of every decoder family, made for the tests, and their files in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXTS = [
    "The capital of France is Paris. The capital of Japan is Tokyo. def main(argv): return 0",
    "what is two plus two? it's four, isn't it? we've seen they're fine. hello world hello there",
    '{"name": "get_weather", "arguments": {"city": "Oslo"}} <b>bold</b> a < b && c > d',
    "你好世界 こんにちは 안녕하세요 Привет мир naïve café über 👋🏽 🎉 👩‍👩‍👧 é é",
] * 8


def byte_level_backend() -> Backend:
    """Qwen's structure: NFC, the GPT-2 alphabet, ChatML tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_TEXTS, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    return backend


def byte_fallback_backend() -> Backend:
    """Llama 2's structure: Replace, ByteFallback, Fuse and Strip; every byte has a token."""
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzTFPJ.,!?é世界", "▁t", "he", "▁the", "▁▁", "is", "▁a"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "s"), ("▁", "a")]
    vocab = {token: index for index, token in enumerate([*base, *letters])}
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in base[:3]])
    return backend


def gemma_backend() -> Backend:
    """Gemma's structure: Llama 2's without the stripped space."""
    backend = byte_fallback_backend()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def two_blanks_backend() -> Backend:
    """A decoder that strips up to two blanks from the start."""
    backend = byte_fallback_backend()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return backend


def unusual_backend() -> Backend:
    """Llama 2's steps in an order that no model uses."""
    backend = byte_fallback_backend()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    return backend


def metaspace_backend() -> Backend:
    """T5's structure."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "▁▁x", "▁a▁b"])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return backend


def word_piece_backend() -> Backend:
    """BERT's structure."""
    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "cat",
        "##s",
        "do",
        "not",
        "##n't",
        ".",
        ",",
        "'",
        "##ing",
        "do not",
        "é",
    ]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in words[:3]])
    return backend


def suffix_backend() -> Backend:
    """The first GPT's structure: the last token of a word has a mark."""
    vocab = {token: index for index, token in enumerate(["<unk>", "the</w>", "c", "at</w>", "s</w>", "a", "</w>"])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return backend


def no_decoder_backend() -> Backend:
    """Tokens are joined with spaces."""
    return Backend(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2, "é": 3, "\ufffd": 4}, unk_token="<unk>"))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte level": byte_level_backend,
    "byte fallback": byte_fallback_backend,
    "gemma": gemma_backend,
    "two blanks": two_blanks_backend,
    "metaspace": metaspace_backend,
    "word piece": word_piece_backend,
    "suffix": suffix_backend,
    "no decoder": no_decoder_backend,
}


def write_tokenizer(folder: Path, backend: Backend, config: dict[str, object] | None = None) -> Path:
    """Write a checkpoint's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
