"""The interval of the process is short while it is needed, and restored afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from aengine.engine.interpreter import SWITCH_SECONDS, QuickSwitches


@pytest.fixture
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield pytest.approx(0.004)
    sys.setswitchinterval(before)


def test_it_is_short_until_the_last_user_ends(usual: float) -> None:
    quick = QuickSwitches()
    for _ in range(2):
        with quick:
            with quick:
                assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert sys.getswitchinterval() == usual


def test_it_is_restored_after_an_error(usual: float) -> None:
    with pytest.raises(KeyError), QuickSwitches():
        raise KeyError
    assert sys.getswitchinterval() == usual


def test_two_owners_never_leave_it_short(usual: float) -> None:
    first, second = QuickSwitches(), QuickSwitches()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    second.__exit__()
    assert sys.getswitchinterval() == usual
    with second:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == usual
