"""Finds the folder of a model or an adapter: a path, or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from aengine.errors import AdapterError, HubError, UnsupportedModelError
from aengine.model.checkpoint.foreign import refuse_file, refuse_layout

DEMO = Path(__file__).parents[2] / "demo" / "model"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", re.ASCII)
# The files that loading reads. From subfolders only JSON and chat templates are needed: sentence-transformers keeps its
# pooling settings there. Some repositories have a second copy of all weights as consolidated*.safetensors.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_UNWANTED = ["consolidated*", "*/*.safetensors", "*/tokenizer*"]
_OF_ADAPTERS = ["adapter_config.json", "adapter_model.safetensors"]


def resolve_model(model: str | None, revision: str | None = None, knob: str = "model") -> Path:
    """Return the folder of a model.

    model: a path, or a Hugging Face id, whose folder in the cache is returned. None: the demo model.
    knob: named in errors.

    Does blocking I/O, and downloads files that the cache lacks. `HF_HUB_OFFLINE`, `HF_HOME` and the hub client's other
    variables apply.

    Raises `HubError`, and `UnsupportedModelError` if the model is in a known format that is not supported.
    """
    if model is None:
        return DEMO
    if Path(model).expanduser().is_file():
        refuse_file(Path(model), knob)
    folder = _resolved(knob, model, revision, _WANTED)
    if not (folder / "config.json").exists():
        refuse_layout(folder, knob)
        if "gguf" in folder.name.lower() or "gguf" in model.lower():
            raise UnsupportedModelError(f"{knob}: {model} has no config.json; it seems to hold GGUF, which is not read")
    return folder


def resolve_adapter(path: str) -> Path:
    """Return the folder of a PEFT adapter, as `resolve_model` does.

    Raises `HubError`, and `AdapterError` if the folder has a link to a file elsewhere or a circular link.
    """
    folder = _resolved("adapter", path, None, _OF_ADAPTERS)
    try:
        link = outward_link(folder.resolve())
    except OSError:
        raise AdapterError(f"adapter: {path} cannot be listed; check its permissions") from None
    if link is not None:
        raise AdapterError(
            f"adapter: {path} has a link that leads to no file within it, {link.name}; copy the file into the folder"
        )
    return folder


def outward_link(folder: Path, top: Path | None = None) -> Path | None:
    """Return a link in a folder or its subfolders that is circular or leads elsewhere; None if there is none.

    No such file is read, so that no error reveals its content or size. The folder of a repository in the hub's cache
    has links to the repository's `blobs`, which are not elsewhere.

    folder: without links in its own path. top: below which links may lead; None: the folder.

    Does blocking I/O; call it in a worker thread. Raises OSError if a folder cannot be listed.
    """
    allowed = [folder if top is None else top]
    snapshots = next((above for above in folder.parents if above.name == "snapshots"), None)
    if snapshots is not None and snapshots.parent.name.startswith("models--"):
        allowed.append(snapshots.parent / "blobs")
    return _outward_link(folder, allowed)


def _outward_link(folder: Path, allowed: Sequence[Path], depth: int = 1) -> Path | None:
    for path in folder.iterdir():
        if path.is_symlink() and not _leads_below(path, allowed):
            return path
        if depth and path.is_dir() and (found := _outward_link(path, allowed, depth - 1)) is not None:
            return found
    return None


def _leads_below(link: Path, allowed: Sequence[Path]) -> bool:
    try:
        target = link.resolve()
    except RuntimeError:  # circular links, before Python 3.13
        return False
    return not target.is_symlink() and any(target.is_relative_to(one) for one in allowed)


def is_hub_id(text: str) -> bool:
    """Return whether the text looks like a Hugging Face id, owner/name."""
    return "/" in text and _HUB_ID.fullmatch(text) is not None


def _resolved(kind: str, name: str, revision: str | None, wanted: list[str]) -> Path:
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise HubError(f"{kind}: {name} is a file; give the folder that holds its config and weights")
    if not _HUB_ID.fullmatch(name):
        raise HubError(f"{kind}: there is no folder {name!r}, and it is no Hugging Face id (owner/name)")
    return _from_hub(kind, name, revision, wanted)


def _from_hub(kind: str, repo: str, revision: str | None, wanted: list[str]) -> Path:
    # Imported here, because a local folder does not need the hub's client.
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED))
    except Exception as error:  # the client's errors and those of its HTTP library share no base
        what = f"{repo} (revision {revision or 'main'})"
        if constants.HF_HUB_OFFLINE:
            raise HubError(
                f"{kind}: {what} is neither a folder here nor complete in the cache {constants.HF_HUB_CACHE}, and "
                f"HF_HUB_OFFLINE forbids downloading it; unset HF_HUB_OFFLINE, run `hf download {repo}` where there is "
                f"a network and copy the cache, or give the path of a folder"
            ) from error
        raise HubError(
            f"{kind}: {what} is neither a folder here nor complete in the cache {constants.HF_HUB_CACHE}, and "
            f"downloading it failed: {type(error).__name__}: {error}; check the name, the network and, if it "
            f"is gated, HF_TOKEN, or give the path of a folder"
        ) from error
