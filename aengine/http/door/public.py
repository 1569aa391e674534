"""The part of an error's message that clients may see."""

from __future__ import annotations

import re

from aengine.errors import AengineError, InvalidRequestError, ModelNotFoundError

# Folders in front of a file name. A slash inside a word (a model id), after another one (a URL) or after a method of
# HTTP (an endpoint) starts none.
_FOLDERS = re.compile(r"(?<![\w./:-])(?<!GET )(?<!POST )(?:~|[A-Za-z]:)?[/\\](?=[^\s/\\])(?:[^/\\\s'\"`]+[/\\])*")


def public_message(error: BaseException) -> str:
    """The message for clients: aengine's own words without folders; of other libraries' errors only the kind."""
    if isinstance(error, (InvalidRequestError, ModelNotFoundError)):
        return str(error)  # speaks of the client's own words
    if isinstance(error, AengineError):
        return _FOLDERS.sub("", str(error))
    return f"internal error ({type(error).__name__}); the server's log has the details"
