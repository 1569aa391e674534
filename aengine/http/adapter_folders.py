"""Which adapters a client may have loaded: what lies below the folders that a knob names, and Hugging Face ids if
another one allows them. A path in a request reads nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aengine.http.door.errors import HTTPError
from aengine.http.folders import folder_below
from aengine.model.loading.hub import is_hub_id


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
