"""One Chromium per module, one fresh tab per test, which must end without a complaint and without a foreign request."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.chromium import Chromium, Tab, chromium, find_chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncIterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    async with chromium(program) as running:
        yield running


@pytest.fixture
async def tab(browser: Chromium) -> AsyncIterator[Tab]:
    """Tests that provoke a complaint clear `tab.complaints`."""
    async with browser.tab() as tab:
        yield tab
        # While the model loads, /health says so with 503, which a browser notes down by itself.
        assert [one for one in tab.complaints if not (" 503 " in one and one.endswith("/health"))] == []
        assert {urlsplit(url).hostname for url in tab.requested if not url.startswith(("data:", "blob:"))} <= {
            "127.0.0.1"
        }
