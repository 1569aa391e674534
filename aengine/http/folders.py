"""Folders that a request may name: what lies below those that a knob allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def folder_below(tops: Sequence[str], path: str) -> str | None:
    """The folder of that path; None: there is none below `tops`. Looks at files: to be called off the loop.

    Relative paths begin in each of `tops` in turn; symbolic links count as what they lead to. So do those among its
    files: a folder with one that leads elsewhere is none of these, and nothing of that file is told.
    """
    for folder in tops:
        try:
            top = Path(folder).expanduser().resolve()
            found = (top / path).resolve()
            if found.is_relative_to(top) and found.is_dir() and not _leads_out(found, top):
                return str(found)
        except (OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
            continue
    return None


def _leads_out(folder: Path, top: Path, depth: int = 1) -> bool:
    """Whether a file of the folder, or of one within, is a link to what is not below `top`."""
    for path in folder.iterdir():
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            return True
        if depth and path.is_dir() and _leads_out(path, top, depth - 1):
            return True
    return False
