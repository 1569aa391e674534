"""One server for all tests of bad input, so that a later test notices what an earlier one broke."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.bad_input.hostile import CANARY, Hostile, hostile_demo


@pytest.fixture(scope="session", autouse=True)
def canary() -> Iterator[None]:
    """A secret in the environment that no answer may sing of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*CANARY)
        yield


@pytest.fixture(scope="session")
def shared_hostile() -> Iterator[Hostile]:
    with hostile_demo() as hostile:
        yield hostile


@pytest.fixture
def hostile(shared_hostile: Hostile) -> Iterator[Hostile]:
    yield shared_hostile
    shared_hostile.settled()
