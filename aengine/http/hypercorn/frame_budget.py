"""A token bucket for the frames of an HTTP/2 connection that make work and bring nothing.

Such are resets, settings, pings, window updates, headers, empty data: each alone is honest, thousands of them are an
attack (rapid reset, CVE-2023-44487, and its kin). Tokens come with time, and with what the client is sent: so a proxy
that cancels for many users, or a client that acknowledges every fragment, pays with the answers that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 1000.0  # tokens that a connection has at first and at most: 166 requests that are reset at once
PER_SECOND = 100.0  # tokens: 16 such requests
# Tokens for each part of an answer's body, and for an answer without any: two window updates, a ping, and one to
# spare. Less than a request and its reset, so that answers, however early, never pay for a flood of these.
PER_MESSAGE = 4.0


class FrameBudget:
    """The token bucket of one connection."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._tokens = BURST

    def earn(self) -> None:
        """Add tokens for a part of an answer that goes out."""
        self._tokens = min(BURST, self._tokens + PER_MESSAGE)

    def spend(self, tokens: int) -> bool:
        """Take tokens; whether there were as many."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._at) * PER_SECOND)
        self._at = now
        self._tokens -= tokens
        return self._tokens >= 0
