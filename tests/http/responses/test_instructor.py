"""instructor in its mode for this API: typed answers through a forced tool."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

instructor = pytest.importorskip(
    "instructor", reason="instructor is not installed: pip install '.[clients]'", exc_type=ImportError
)


class Sum(BaseModel):
    left: int
    right: int


def test_a_typed_answer(demo_url: str) -> None:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        typed = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
        requested: dict[str, Any] = {"model": "aengine-demo", "input": "What is 17 + 25?", "temperature": 0}
        assert isinstance(typed.responses.create(**requested, response_model=Sum, max_retries=0), Sum)
        partial = list(typed.responses.create_partial(**requested, response_model=Sum, max_retries=0))
    assert isinstance(partial[-1], Sum)
