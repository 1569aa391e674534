"""Drafts do not depend on how long steps take, so that tests know how many there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aengine.runtime.speculation import choose
from aengine.step_cost import FREE


@pytest.fixture(scope="package", autouse=True)
def free_drafts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "step_cost", lambda proposer, model, device: FREE)
        yield
