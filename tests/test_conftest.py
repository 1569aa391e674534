"""Which tests are not even collected."""

from __future__ import annotations

import pytest

from tests.conftest import never_on_a_gpu


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("not gpu and not slow and not alone", True),
        ("(slow or hypothesis) and not gpu and not alone", True),
        ("ray and not gpu", True),
        ("slow or not gpu", False),
        ("not (gpu and slow)", False),
        ("gpu and not alone", False),
        ("slow", False),
        ("", False),
    ],
)
def test_tests_for_a_gpu_are_collected_wherever_one_may_be_selected(selection: str, expected: bool) -> None:
    assert never_on_a_gpu(selection) == expected
