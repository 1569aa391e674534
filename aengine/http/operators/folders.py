"""Folders that a request may name: adapters and weights below those that a knob allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.http.door.errors import HTTPError
from aengine.model.loading.hub import is_hub_id


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


class AdapterFolders:
    """The knobs `lora_folders` and `lora_hub`."""

    def __init__(self, folders: Sequence[str], hub: bool) -> None:
        self._folders = folders
        self._hub = hub

    def find(self, path: str) -> str:
        """The folder of an adapter, or the Hugging Face id. Looks at files: to be called off the loop.

        Raises one and the same `HTTPError` for what is elsewhere and for what is nowhere.
        """
        found = folder_below(self._folders, path)
        if found is not None:
            return found
        if self._hub and is_hub_id(path) and not Path(path).exists():  # which would be read in its place
            return path
        ids = ", or a Hugging Face id" if self._hub else "; Hugging Face ids are off here (knob lora_hub)"
        raise HTTPError(
            404, "adapter_not_found", f"lora_path: no such folder below those of the server's knob lora_folders{ids}"
        )
