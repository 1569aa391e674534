"""`python -m tests.browser.picture FILE.png`: a picture of the page for the README, with the demo model at work."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import anyio
import httpx2

from tests.browser.chromium import Tab, chromium, find_chromium
from tests.browser.talking import ENDED, ask, demo_page

COUNTRIES = ("Italy", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Chile", "Spain")
BUSY_SECONDS = 22


async def crowd(url: str) -> None:
    """Send a varying number of other requests for long enough to draw a curve."""
    rng = random.Random(3)

    async def one(client: httpx2.AsyncClient, country: str) -> None:
        question = {"role": "user", "content": f"What is the capital of {country}? Tell me a story about it."}
        body = {"messages": [question], "max_tokens": rng.randint(20, 120), "ignore_eos": True}
        await client.post("/v1/chat/completions", json=body)

    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        with anyio.move_on_after(BUSY_SECONDS):
            while True:
                async with anyio.create_task_group() as tasks:
                    for country in rng.sample(COUNTRIES, rng.randint(1, 6)):
                        tasks.start_soon(one, client, country)


async def conversation(tab: Tab) -> None:
    for thinking, question in (
        ("", "What is the capital of France?"),
        ("on", "What is 17 + 25?"),
        ("", "Tell me a story."),
    ):
        await tab.evaluate(f"document.querySelector('[name=thinking]').value = {thinking!r}")
        await ask(tab, question)
        await tab.until(ENDED)
    await tab.click(".thought:not([hidden]) summary")
    await tab.click("#question")


async def picture() -> bytes:
    """PNG."""
    program = find_chromium()
    if program is None:
        raise SystemExit("a Chromium is needed (on Debian: apt-get install chromium)")
    async with chromium(program) as browser, browser.tab() as tab, demo_page(tab) as url:
        await tab.look(1280, 810)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crowd, url)
            await anyio.sleep(BUSY_SECONDS - 5)
            await conversation(tab)
            taken = await tab.picture()
            tasks.cancel_scope.cancel()
    return taken


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(asyncio.run(picture()))
