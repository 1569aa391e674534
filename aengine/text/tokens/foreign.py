"""Tokenizers in other forms than tokenizer.json, which are named and not read."""

from __future__ import annotations

import json
from pathlib import Path

from aengine.errors import CheckpointError
from aengine.text.tokens.settings import read_text

_FORMS = {
    "tiktoken.model": "ranks of tiktoken's",
    "tekken.json": "Mistral's tekken",
    "tokenizer.model": "a model of SentencePiece's",
    "vocab.json": "a vocabulary without its rules",
}


def refuse_without_json(folder: Path) -> None:
    """Raise `CheckpointError`, saying what there is instead, unless the folder has a tokenizer.json."""
    if (folder / "tokenizer.json").exists():
        return
    there = [f"{name} ({form})" for name, form in _FORMS.items() if (folder / name).is_file()]
    found = f"; there is {', '.join(there)}" if there else ""
    if code := _code(folder):
        found += (
            f"; its tokenizer is code of the repository's own ({code}, which `trust_remote_code` would run elsewhere), "
            f"and such code is never run here"
        )
    raise CheckpointError(
        f"{folder / 'tokenizer.json'} cannot be read: there is none, and no other form of a tokenizer is read{found}; "
        f"put a tokenizer.json there, as transformers writes it of a converted tokenizer "
        f"(`PreTrainedTokenizerFast.save_pretrained`)"
    )


def _code(folder: Path) -> str:
    """The class that tokenizer_config.json has transformers run for its tokenizer; empty: none, or nothing to be read.

    A file that cannot be read is somebody else's to refuse.
    """
    try:
        config = json.loads(read_text(folder / "tokenizer_config.json"))
        named = config["auto_map"]["AutoTokenizer"]
    except (CheckpointError, ValueError, RecursionError, LookupError, TypeError):
        return ""
    classes = named if isinstance(named, list) else [named]
    return next((name[:100] for name in classes if isinstance(name, str)), "")
