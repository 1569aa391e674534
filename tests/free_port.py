"""A free port for a server whose port must be known before it starts."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    """Return a random free port below the range that systems assign.

    A concurrent test that listens on any port then never gets the same port before the server binds it.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
