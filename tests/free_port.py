"""A port for a server that is told its port before it starts."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    """One drawn from below those that systems give out by themselves: until the server has it, a test beside this one
    that listens on any port is not given the same."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
