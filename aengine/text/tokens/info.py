"""The body of `/tokenizer_info`: what clients need that tokenize, or render chats, on their own side."""

from __future__ import annotations

import msgspec


class AddedTokenInfo(msgspec.Struct, frozen=True):
    """A token beside the vocabulary that text is cut into."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Under the names of tokenizer_config.json. Chosen field by field: that file may hold paths of other machines."""

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
    add_bos_token: bool | None  # null: as tokenizer.json has it
    add_eos_token: bool | None
    chat_template: str | dict[str, str] | None  # by name, where there are several
