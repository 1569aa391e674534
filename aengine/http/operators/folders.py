"""Checks the folders that requests name: they must be below folders that a knob allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.http.entry.errors import HTTPError
from aengine.model.loading.hub import is_hub_id, outward_link


def folder_below(tops: Sequence[str], path: str, *, shared: bool = True) -> str | None:
    """Return the folder of this path; None if it is not below one of `tops`.

    Relative paths are tried in each of `tops`. Symbolic links are resolved. A folder with a link to a file elsewhere is
    refused as well, so that no error reveals that file. Does blocking I/O; call it in a worker thread.

    shared: whether links may lead to other folders below the same one of `tops`.
    """
    for folder in tops:
        try:
            top = Path(folder).expanduser().resolve()
            found = (top / path).resolve()
            below = found.is_relative_to(top) and found.is_dir()
            if below and outward_link(found, top if shared else None) is None:
                return str(found)
        except (OSError, ValueError, RuntimeError):  # a path that is too long, a null byte, or circular links
            continue
    return None


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
        found = folder_below(self._folders, path, shared=False)
        if found is not None:
            return found
        if self._hub and is_hub_id(path) and not Path(path).exists():  # an existing path would be read instead
            return path
        ids = ", or a Hugging Face id" if self._hub else "; Hugging Face ids are off here (knob lora_hub)"
        raise HTTPError(
            404, "adapter_not_found", f"lora_path: no such folder below those of the server's knob lora_folders{ids}"
        )
