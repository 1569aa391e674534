"""Measures other clients during an attack."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

import httpx2

from tests.reliability.bad_input.hostile import API_KEY, Hostile


class Meanwhile:
    """Asks for `/health` over and over for as long as it is open, and lets `clients` send `body` to `endpoint` once.

    `worst` is the longest that `/health` took, in seconds; every answer of it must be 200.
    """

    def __init__(
        self, hostile: Hostile, endpoint: str = "", body: dict[str, Any] | None = None, clients: int = 0
    ) -> None:
        self._hostile = hostile
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._watch)]
        self._threads += [threading.Thread(target=self._send, args=(endpoint, body)) for _ in range(clients)]
        self._unhealthy: list[str] = []
        self.worst = 0.0
        self.asked = 0
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._unhealthy, self._unhealthy[0]
        assert self.asked

    def _watch(self) -> None:
        with httpx2.Client(base_url=self._hostile.client.base_url, timeout=30, trust_env=False) as client:
            while True:
                began = time.monotonic()
                response = client.get("/health")
                self.worst = max(self.worst, time.monotonic() - began)
                self.asked += 1
                if response.status_code != 200:
                    self._unhealthy.append(response.text)
                if self._done.wait(0.005):
                    return

    def _send(self, endpoint: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        url = self._hostile.client.base_url
        with httpx2.Client(base_url=url, timeout=60, trust_env=False, headers=headers) as client:
            self.statuses[self._hostile.judged(client.post(endpoint, json=body)).status_code] += 1
