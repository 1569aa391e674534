"""Tools, and answers that call them."""

from __future__ import annotations

from typing import Any

from aengine.text.answer.parser import AnswerFormat
from aengine.text.answer.reader import Reader
from aengine.text.reading import AnswerReading
from tests.http.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello there"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
QWEN = AnswerFormat(calls="hermes", thoughts=True)
CALL = ["<tool_call>", '\n{"name": "f", ', '"arguments": {"a', '": 1}', "}\n</tool", "_call>"]


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def reader(reading: AnswerReading, opens_thought: bool = False) -> Reader:
    return reading.reader(opens_thought, lambda token_id: b"")


def saying(*words: str, form: AnswerFormat = QWEN, opens_thought: bool = False) -> FakeEngine:
    engine = FakeEngine()
    engine.words, engine.answer_format, engine.opens_thought = words, form, opens_thought
    return engine


def thought(text: str) -> dict[str, Any]:
    """The fields of a thought, under both names."""
    return {"reasoning_content": text, "reasoning": text}
