"""Sets of module names, read from lists in a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from aengine.model.fields import Fields, shown

# Limits for a checkpoint's patterns, so that matching takes neither exponential time nor a high power of the length.
_MAX_PATTERN = 512
_MAX_REPEATS = 4  # of anything except digits
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]|\\[1-9]|\(\?P=|\(\?\(")
_REPEAT = re.compile(r"(?<!\\)(?<!\\d)(?<!0-9\])[*+{]")
_LINEAR = "Linear"  # all modules that are looked up are of this class
_PLAIN = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, slots=True)
class Names:
    """A set of module names such as "model.layers.0.mlp.up_proj": `name in names`."""

    all: bool = False
    exact: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()  # consecutive whole words of the name: "mlp.gate" is not in "mlp.gate_proj"
    endings: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()  # matched from the start of the name

    def __contains__(self, name: str) -> bool:
        if self.all or name in self.exact or name.endswith(self.endings):
            return True
        if self.runs:
            words = name.split(".")
            count = len(words)
            if any(".".join(words[i:j]) in self.runs for i in range(count) for j in range(i + 1, count + 1)):
                return True
        return any(pattern.match(name) for pattern in self.patterns)


def hugging_face_names(fields: Fields, key: str, *more: str) -> Names:
    """Read a list such as `modules_to_not_convert`: parts of names, endings, or regular expressions for whole words."""
    texts = [text.removesuffix(".weight").strip(".") for text in fields.strings(key)] if fields.present(key) else []
    plain = [text for text in texts if _PLAIN.fullmatch(text)]
    others = [text for text in texts if text and not _PLAIN.fullmatch(text)]
    return Names(
        runs=frozenset([*plain, *more]),
        endings=tuple(text for text in plain if "." not in text),
        patterns=tuple(pattern(fields, key, text, ending=r"(?:(?<=\.)|(?=\.|$))") for text in others),
    )


def wildcard_names(fields: Fields, key: str) -> Names:
    """Read a list of whole words of names, or of whole names in which * stands for any text."""
    texts = fields.strings(key) if fields.present(key) else []
    wild = [re.sub(r"(?:\\\*)+", ".*", re.escape(text)) for text in texts if "*" in text]
    return Names(
        runs=frozenset(text for text in texts if text and "*" not in text),
        patterns=tuple(pattern(fields, key, text, ending="$") for text in wild),
    )


def compressed_tensors_names(fields: Fields, key: str, texts: Iterable[str]) -> Names:
    """Read `ignore` or `targets`: full names, classes, or patterns for the start of a name, which begin with "re:"."""
    exact, patterns = [], []
    for text in texts:
        if text.startswith("re:"):
            patterns.append(pattern(fields, key, text.removeprefix("re:")))
        else:
            exact.append(text)
    return Names(all=_LINEAR in exact, exact=frozenset(exact), patterns=tuple(patterns))


def pattern(fields: Fields, key: str, text: str, ending: str = "") -> re.Pattern[str]:
    """Compile a regular expression of a checkpoint. Raises `CheckpointError` if it could run for ever."""
    if len(text) > _MAX_PATTERN:
        raise fields.fail(key, f"has a pattern of {len(text)} characters, more than {_MAX_PATTERN}: {shown(text)}")
    if _REPEATED_GROUP.search(text) or len(_REPEAT.findall(text)) > _MAX_REPEATS:
        raise fields.fail(
            key, f"has a pattern that repeats groups, refers back or repeats too often to be safe: {shown(text)}"
        )
    try:
        return re.compile(f"(?:{text}){ending}")
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.fail(key, f"has an invalid pattern {shown(text)}: {error}") from None
