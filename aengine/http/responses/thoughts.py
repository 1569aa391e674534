"""`encrypted_content`: a thought as text that only its server reads.

It is base64, not encryption: the client may see the thought anyway. Clients that keep nothing of a thought but this
(Codex) send it back, so that the model finds its own words again, and the prefix cache their keys and values.
"""

from __future__ import annotations

import base64
import binascii

from aengine.errors import InvalidRequestError

_OURS = "aengine-thought:"


def sealed(thought: str) -> str:
    """The thought as `encrypted_content`."""
    return _OURS + base64.b64encode(thought.encode()).decode()


def unsealed(content: str, where: str) -> str | None:
    """The thought in an `encrypted_content`; None for another server's. Raises `InvalidRequestError`."""
    if not content.startswith(_OURS):
        return None
    try:
        return base64.b64decode(content.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{where}: it has been changed since it was given", where) from None
