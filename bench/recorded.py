"""Waits until an engine has recorded all of its graphs, which it goes on with while nothing runs."""

from __future__ import annotations

import asyncio

import aengine


async def recorded(engine: aengine.Engine) -> None:
    """What is timed from here on is not padded to larger graphs than there will be."""
    recorder = engine._ready().runtime.recorder
    while recorder is not None and recorder.left:
        await asyncio.sleep(0.02)
