"""The control tokens of harmony, the format of gpt-oss, and how a chat template shows that it is used."""

from __future__ import annotations

from aengine.text.answer.thought import ThoughtMarkers

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
CONTROL = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
STOPS = (CALL, RETURN)  # each ends an answer

# Around the thought that an answer begins with.
HARMONY_THOUGHT = ThoughtMarkers(f"{CHANNEL}analysis{MESSAGE}", END)


def uses_harmony(template: str) -> bool:
    """Whether a chat template writes messages with channels."""
    return all(token in template for token in (START, CHANNEL, MESSAGE)) and "analysis" in template
