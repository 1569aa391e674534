"""The knobs and their derived values."""

from __future__ import annotations

import msgspec
import pytest

from aengine.config import EngineConfig, ServerConfig
from aengine.config.configure import configure


@pytest.mark.parametrize(
    ("knobs", "places"),
    [
        ({}, 0),
        ({"max_loras": 4}, 0),  # there are no adapters
        ({"lora": "a=x,b=y"}, 2),
        ({"lora": {f"a{i}": "x" for i in range(20)}}, 8),
        ({"lora": "a=x", "max_loras": 4}, 4),
        ({"lora_loading": True}, 8),
    ],
)
def test_the_device_has_room_for_as_many_adapters_as_are_named(knobs: dict[str, object], places: int) -> None:
    assert configure(EngineConfig, {}, **knobs).lora_places() == places


def test_every_knob_has_a_line_of_help() -> None:
    for kind in (EngineConfig, ServerConfig):
        for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[union-attr]
            kinds = getattr(field.type, "types", ()) or (field.type,)
            shown = [field.type, *kinds]
            assert any((getattr(one, "extra_json_schema", None) or {}).get("description") for one in shown), field.name
