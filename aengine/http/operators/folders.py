"""Checks the folders that requests name: they must be below folders that a knob allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.http.entry.errors import HTTPError
from aengine.model.loading.hub import is_hub_id


def folder_below(tops: Sequence[str], path: str) -> str | None:
    """Return the folder of this path; None if it is not below one of `tops`.

    Relative paths are tried in each of `tops`. Symbolic links are resolved. A folder with a link to a file elsewhere is
    refused as well, so that no error reveals that file. Does blocking I/O; call it in a worker thread.
    """
    for folder in tops:
        try:
            top = Path(folder).expanduser().resolve()
            found = (top / path).resolve()
            if found.is_relative_to(top) and found.is_dir() and not _leads_out(found, top):
                return str(found)
        except (OSError, ValueError, RuntimeError):  # a path that is too long, a null byte, or circular links
            continue
    return None


def _leads_out(folder: Path, top: Path, depth: int = 1) -> bool:
    """Whether a file in the folder or its subfolders is a link to a file that is not below `top`."""
    for path in folder.iterdir():
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            return True
        if depth and path.is_dir() and _leads_out(path, top, depth - 1):
            return True
    return False


class AdapterFolders:
    """Finds adapters as the knobs `lora_folders` and `lora_hub` allow. Requests cannot read any other path."""

    def __init__(self, folders: Sequence[str], hub: bool) -> None:
        self._folders = folders
        self._hub = hub

    def find(self, path: str) -> str:
        """Return the folder of an adapter, or the Hugging Face id.

        Raises the same `HTTPError` for a path elsewhere and for a missing one. Does blocking I/O; call it in a worker
        thread.
        """
        found = folder_below(self._folders, path)
        if found is not None:
            return found
        if self._hub and is_hub_id(path) and not Path(path).exists():  # an existing path would be read instead
            return path
        ids = ", or a Hugging Face id" if self._hub else "; Hugging Face ids are off here (knob lora_hub)"
        raise HTTPError(
            404, "adapter_not_found", f"lora_path: no such folder below those of the server's knob lora_folders{ids}"
        )
