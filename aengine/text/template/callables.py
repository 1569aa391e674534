"""What a chat template may call beside jinja2's own: namespaces and dicts without their classes' attributes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace


class RaisedByTemplate(TemplateError):
    """The template's own `raise_exception`."""


class TemplateNamespace(Namespace):
    """`namespace()`, closed to names that begin with an underscore, and written without its content."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` works
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces may hold each other, many times over


class TemplateDict:
    """`dict()`, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def raise_exception(message: object) -> None:
    """Refuse the messages in the template's own words."""
    raise RaisedByTemplate(str(message))


def strftime_now(format: str) -> str:  # noqa: A002  the name that templates may use
    """The time of now, of this machine."""
    return datetime.now().strftime(format)
