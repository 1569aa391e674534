"""Reads tokenizer_config.json and the other files of a tokenizer."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from aengine.errors import CheckpointError
from aengine.sizes import format_bytes

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_FILE_BYTES = 16 * 2**20  # JSON grows twentyfold when it is parsed
_LONGEST_NAME = 100
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


class AddedTokenFlags(NamedTuple):
    """One entry of `added_tokens_decoder`."""

    token_id: int
    content: str
    flags: dict[str, bool]


class TokenizerSettings(NamedTuple):
    """The settings outside tokenizer.json. templates: names to Jinja sources."""

    named_tokens: dict[str, str]  # "eos_token" -> "</s>"
    extra_special: tuple[str, ...]
    added_tokens: tuple[AddedTokenFlags, ...]
    add_bos: bool | None  # None means as in tokenizer.json
    add_eos: bool | None
    templates: dict[str, str]
    tokenizer_class: str = "PreTrainedTokenizerFast"


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings; every file is optional. Raises `CheckpointError`, naming the file that cannot be used."""
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    legacy = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.is_file():
        config = {**config, **_read_json(legacy)}

    named = {name: _token_text(path, name, config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    for name, value in config.items():  # such as image_token
        if name.endswith("_token") and isinstance(value, (str, dict)):
            named.setdefault(name, _token_text(path, name, value))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named.update({name: _token_text(path, name, value) for name, value in extra.items()})
        extra = []
    if not isinstance(extra, list):
        raise CheckpointError(f"{path}: extra_special_tokens must be a list of tokens")
    return TokenizerSettings(
        named_tokens=named,
        extra_special=tuple(_token_text(path, "extra_special_tokens", value) for value in extra),
        added_tokens=_added_tokens(path, config.get("added_tokens_decoder") or {}),
        add_bos=_flag(path, config, "add_bos_token"),
        add_eos=_flag(path, config, "add_eos_token"),
        templates=_templates(folder, path, config.get("chat_template")),
        tokenizer_class=str(config.get("tokenizer_class", "PreTrainedTokenizerFast"))[:_LONGEST_NAME],
    )


def read_text(path: Path) -> str:
    """Read a UTF-8 text file of at most 16 MiB. Raises `CheckpointError`, naming the file."""
    try:
        text = read_bytes(path, _MAX_FILE_BYTES).decode("utf-8")  # takes a fifth of the time of `Path.read_text`
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises `CheckpointError`, naming the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise CheckpointError(f"{path} cannot be read: it is not a regular file")
        if status.st_size > most:
            raise CheckpointError(f"{path} is larger than {format_bytes(most)}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(path: Path, name: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        name = name if name.isprintable() else repr(name)
        raise CheckpointError(f"{path}: {name:.100} must be a string or an object with content, not {value!r:.80}")
    return text


def _flag(path: Path, config: dict[str, object], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} must be true or false, not {value!r:.80}")
    return value


def _added_tokens(path: Path, value: object) -> tuple[AddedTokenFlags, ...]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object")
    found = []
    for key, entry in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or not isinstance(entry, dict):
            raise CheckpointError(f"{path}: added_tokens_decoder holds {key!r:.80}, which is not an id with its token")
        flags = {name: entry[name] for name in _FLAGS if name in entry}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise CheckpointError(f"{path}: the flags of added token {key} must be true or false")
        found.append(AddedTokenFlags(int(key), _token_text(path, f"added token {key}", entry), flags))
    return tuple(sorted(found))


def _templates(folder: Path, path: Path, value: object) -> dict[str, str]:
    """Return the templates by name; a lone one is called "default". Template files replace those in the config.

    Vision models may have theirs in chat_template.json, next to a tokenizer_config.json without one.
    """
    templates: dict[str, str] = {}
    default = folder / "chat_template.jinja"
    if default.is_file():
        templates["default"] = read_text(default)
    more = folder / "additional_chat_templates"
    if more.is_dir():
        templates.update({file.stem: read_text(file) for file in sorted(more.glob("*.jinja"))})
    older = folder / "chat_template.json"
    if not templates and value is None and older.is_file():
        path, value = older, _read_json(older).get("chat_template")
    if templates or value is None:
        return templates
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        template = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of objects with name and template")
        templates[name] = template
    return templates


_FORMS = {
    "tiktoken.model": "tiktoken's ranks",
    "tekken.json": "Mistral's tekken",
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "a vocabulary without its rules",
}


def refuse_without_json(folder: Path) -> None:
    """Raise `CheckpointError` unless the folder has a tokenizer.json. The error names the other tokenizers in it."""
    if (folder / "tokenizer.json").exists():
        return
    there = [f"{name} ({form})" for name, form in _FORMS.items() if (folder / name).is_file()]
    found = f"; there is {', '.join(there)}" if there else ""
    if code := _custom_class(folder):
        found += (
            f"; its tokenizer is code in the repository ({code}, which `trust_remote_code` would run elsewhere), "
            f"and such code is never run here"
        )
    raise CheckpointError(
        f"{folder / 'tokenizer.json'} cannot be read: there is none, and no other kind is supported{found}; "
        f"put a tokenizer.json there: transformers writes one when it saves a converted tokenizer "
        f"(`PreTrainedTokenizerFast.save_pretrained`)"
    )


def _custom_class(folder: Path) -> str:
    """Return the name of the tokenizer class in the repository's own code; empty if tokenizer_config.json names none.

    A file that cannot be read counts as naming none, because other code refuses it.
    """
    try:
        config = json.loads(read_text(folder / "tokenizer_config.json"))
        named = config["auto_map"]["AutoTokenizer"]
    except (CheckpointError, ValueError, RecursionError, LookupError, TypeError):
        return ""
    classes = named if isinstance(named, list) else [named]
    return next((name[:100] for name in classes if isinstance(name, str)), "")


class AddedTokenInfo(msgspec.Struct, frozen=True):
    """A token that text is cut into before the vocabulary's own rules apply."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of tokenizer_config.json under their names there.

    They are listed one by one, because the file may hold paths of other machines.
    """

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    additional_special_tokens: tuple[str, ...]
    added_tokens_decoder: dict[str, AddedTokenInfo]  # by id
    add_bos_token: bool | None  # null means as in tokenizer.json
    add_eos_token: bool | None
    chat_template: str | dict[str, str] | None  # templates by name, if there are several
