"""The body of `/tokenizer_info`, for clients that tokenize or render chats themselves."""

from __future__ import annotations

import msgspec


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
