"""Parses streams of events, and checks them against OpenAI's types and order."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ENDS = {"response.completed", "response.incomplete", "response.failed"}


def parse(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has its type as its name, and OpenAI's client can parse it."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        _EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check that events are numbered, and that each item has its events from the beginning to the end, one by one.

    Returns the response of the last event, which has exactly these items.
    """
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *reported, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert last["type"] in _ENDS
    assert last["response"]["id"] == created["response"]["id"]
    items = []
    while reported:
        end = next(place for place, event in enumerate(reported) if event["type"] == "response.output_item.done")
        items.append(_check_item(reported[: end + 1], len(items)))
        reported = reported[end + 1 :]
    response: dict[str, Any] = last["response"]
    assert response["output"] == items
    Response.model_validate(response, strict=True)
    return response


def _check_item(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    added, *parts, done = events
    item: dict[str, Any] = done["item"]
    assert added["type"] == "response.output_item.added"
    assert added["item"]["status"] == "in_progress"
    assert {event.get("item_id", item["id"]) for event in events} == {item["id"]} == {added["item"]["id"]}
    assert {event["output_index"] for event in events} == {index}
    stem, field, part = {
        "message": ("response.output_text", "text", "response.content_part"),
        "function_call": ("response.function_call_arguments", "arguments", None),
        "custom_tool_call": ("response.custom_tool_call_input", "input", None),
        "reasoning": ("response.reasoning_text", "text", "response.content_part"),
    }[item["type"]]
    if item["summary"] if item["type"] == "reasoning" else False:
        stem, part = "response.reasoning_summary_text", "response.reasoning_summary_part"
    if part is not None:
        opened, *parts, closed = parts
        assert (opened["type"], closed["type"]) == (f"{part}.added", f"{part}.done")
        assert opened["part"] == {
            **closed["part"],
            "text": "",
            **({"logprobs": []} if "logprobs" in closed["part"] else {}),
        }
        content = item.get("content") or item["summary"]
        assert content == [closed["part"]]
    *deltas, ended = parts
    assert {event["type"] for event in deltas} <= {f"{stem}.delta"}
    assert ended["type"] == f"{stem}.done"
    assert ended[field] == "".join(event["delta"] for event in deltas)
    assert all(event["delta"] for event in deltas)
    assert ended[field] == (item[field] if part is None else content[0]["text"])
    return item


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the fields that differ between two answers to the same request."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    left = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    return {**left, "output": output}
