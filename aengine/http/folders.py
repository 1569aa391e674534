"""Folders that a request may name: what lies below those that a knob allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def folder_below(tops: Sequence[str], path: str) -> str | None:
    """The folder of that path; None: there is none below `tops`. Looks at files: to be called off the loop.

    Relative paths begin in each of `tops` in turn; symbolic links count as what they lead to.
    """
    for folder in tops:
        try:
            top = Path(folder).expanduser().resolve()
            found = (top / path).resolve()
            if found.is_relative_to(top) and found.is_dir():
                return str(found)
        except (OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
            continue
    return None
