"""The demo model with two layers for all tests here, and an engine of it for tests that do not change it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

import aengine
from aengine.model.loading import hub
from tests.engine.checkpoints import first_layers

LAYERS = 2  # two, so that the second layer depends on the first


async def idle(engine: aengine.Engine) -> None:
    """Wait until nothing runs or waits, then check that every page and row is accounted for."""
    with anyio.fail_after(60):
        while engine.stats().running or engine.stats().waiting:  # noqa: ASYNC110 - the engine has no such event
            await anyio.sleep(0.001)
    engine.check_integrity()


@pytest.fixture(scope="session")
def shallow_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(tmp_path_factory.mktemp("shallow") / "demo", LAYERS)


@pytest.fixture(scope="module", autouse=True)
def demo(shallow_demo: Path) -> Iterator[None]:
    """Its step takes a third of the time. Modules whose tests need sensible text override this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "DEMO", shallow_demo)
        yield


@pytest.fixture
async def engine() -> AsyncIterator[aengine.Engine]:
    """The demo model on the CPU. At the end, nothing runs and every page is accounted for."""
    async with aengine.Engine(device="cpu", max_num_seqs=32, kv_cache_gib=0.1, progress=False) as engine:
        yield engine
        await idle(engine)
