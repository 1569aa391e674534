"""Bounds what a chat template may do: its time, the text it makes, and the size of any one value.

A thread that renders cannot be killed. So everything a template does draws on a `Budget`. A C call that could take
unbounded time or memory is estimated before it is made.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import ItemsView, Iterable, KeysView, Sequence, ValuesView
from string import Formatter

MAX_INTEGER = 100_000  # for widths, counts and ranges; jinja2's sandbox has the same limit for range()
_MAX_BITS = 65_536
_CONTAINER, _ITEM = 64, 8  # the size of a container and of each of its items, without their content
_TOTAL = 16  # how many values of the largest size may be made in all
_VIEWS = (ItemsView, KeysView, ValuesView)
_DIGITS = re.compile(r"\d+")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?([^A-Za-z%]*)")

# Methods and filters whose time or result grows with the product of their operands' sizes.
_PRODUCTS = frozenset(
    {
        "rfind",
        "rindex",
        "rsplit",
        "rpartition",
        "strip",
        "lstrip",
        "rstrip",
        "trim",
        "indent",
        "center",
        "expandtabs",
        "translate",
    }
)


class LimitError(Exception):
    """A template needs more time or memory than it may have."""


class Budget:
    """One rendering's budget.

    size: the bound on a single value, in characters; containers and their items count as well.
    """

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._largest = size
        self._left = _TOTAL * size
        self._sizes: dict[int, tuple[object, int]] = {}  # by id; holding the object keeps its id from being used again

    def spend(self, amount: int) -> None:
        """Subtract an amount from the budget, and check the time."""
        self._left -= amount
        if self._left < 0:
            raise LimitError("it makes too much text")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {self._seconds:g} seconds")

    def allow(self, size: int) -> None:
        """Refuse to make a value of that size."""
        if size > self._largest:
            raise LimitError("it makes too large a value")

    def take(self, value: object) -> None:
        """Account for a value that was just made."""
        size = self.measure(value)
        self.allow(size)
        # The items of a container were paid for when they were made.
        self.spend(_CONTAINER + _ITEM * len(value) if isinstance(value, (list, tuple, dict)) else size)

    def measure(self, value: object) -> int:
        """Return the size of a value with everything in it.

        A part counts each time that it would be written out.
        """
        if isinstance(value, (str, bytes)):
            return len(value) + 1
        if not isinstance(value, (list, tuple, dict, *_VIEWS)):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        parts: Iterable[object] = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
        size = _CONTAINER + sum(_ITEM + self.measure(part) for part in parts)
        self._sizes[id(value)] = (value, size)
        return size

    def check_call(self, name: str, value: object, arguments: Sequence[object]) -> None:
        """Refuse to call a method or filter if its result could be too large.

        name: the method's or filter's. value: the value it is called on.
        """
        check_integers(arguments)
        if name == "replace" and isinstance(value, str):
            texts = [text for text in arguments if isinstance(text, str)]
            longest = max(map(len, texts), default=0)
            self.allow(len(value) + max((value.count(text) * longest for text in texts), default=0))
        elif name == "join":
            sized = [part for part in (value, *arguments) if isinstance(part, (str, list, tuple, dict, *_VIEWS))]
            *_, shorter, longer = [0, 0, *sorted(map(len, sized))]
            self.allow(sum(map(self.measure, sized)) + shorter * longer)
        elif name in ("format", "format_map", "%") and isinstance(value, str):
            self._check_format(value, _percent_fields(value) if name == "%" else _brace_fields(value), arguments)
        elif name == "sum" and isinstance(value, (list, tuple)) and not all(isinstance(it, int) for it in arguments):
            self.allow(len(value) * self.measure(value))
        elif name in _PRODUCTS:
            widths = [part if isinstance(part, int) else self.measure(part) for part in arguments]
            self.allow(self.measure(value) * max([1, *widths]))

    def check_product(self, left: object, right: object) -> None:
        """Refuse a multiplication that repeats a text or list too often, or makes huge integers."""
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                self.allow(self.measure(value) * times)
        _check_bits(_bits(left) + _bits(right))

    def check_power(self, base: object, exponent: object) -> None:
        """Refuse a power whose result is a huge integer."""
        if isinstance(exponent, int):
            _check_bits(_bits(base) * abs(exponent))

    def _check_format(self, template: str, fields: list[str], arguments: Sequence[object]) -> None:
        """Refuse a format with too many fields, too wide ones, or too large values."""
        digits = [digits for field in fields for digits in _DIGITS.findall(field)]
        widths = [int(width) if len(width) < 7 else MAX_INTEGER + 1 for width in digits]
        check_integers(widths)
        sizes = [part if isinstance(part, int) else self.measure(part) for part in arguments]
        self.allow(len(template) + len(fields) * max([1, *widths, *sizes]))


def _percent_fields(template: str) -> list[str]:
    return _PERCENT_FIELD.findall(template)


def _brace_fields(template: str) -> list[str]:
    """Return the format specifications of `str.format`'s fields.

    Raises `LimitError` for nested fields: their values could be any width.
    """
    specs = [spec or "" for _, field, spec, _ in Formatter().parse(template) if field is not None]
    if any("{" in spec for spec in specs):
        raise LimitError("it nests fields in a format")
    return specs


def check_integers(values: Iterable[object]) -> None:
    """Refuse widths, counts and repetitions that no template needs."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise LimitError(f"it passes a number above {MAX_INTEGER}")


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise LimitError(f"it computes with integers of more than {_MAX_BITS} bits")
