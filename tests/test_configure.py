"""Knobs: one definition for arguments and environment, and errors that name the knob and both ways to set it."""

from __future__ import annotations

import msgspec
import pytest

from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.configure import configure
from aengine.errors import ConfigError

Kind = EngineConfig | ServerConfig | ListenConfig


def test_the_environment_fills_in_and_arguments_win() -> None:
    environ = {"AENGINE_MAX_MODEL_LEN": "4096", "AENGINE_LOOKAHEAD": "false", "AENGINE_MODEL": "", "OTHER": "1"}
    config = configure(EngineConfig, environ)
    assert config.max_model_len == 4096
    assert config.lookahead is False
    assert config.model is None  # empty is unset
    assert configure(EngineConfig, environ, max_model_len=128).max_model_len == 128


def test_lists_are_separated_by_commas() -> None:
    config = configure(ServerConfig, {"AENGINE_ALLOWED_ORIGINS": "https://a.example, https://b.example"})
    assert config.allowed_origins == ("https://a.example", "https://b.example")


def test_adapters_are_names_with_folders() -> None:
    config = configure(EngineConfig, {"AENGINE_LORA": "a=/one, b = owner/two"})
    assert config.lora == {"a": "/one", "b": "owner/two"}
    assert configure(EngineConfig, {}, lora={"a": "/one"}).lora == {"a": "/one"}
    for text in ("a", "a=", "=b", "a=b,c"):
        with pytest.raises(
            ConfigError, match=r"^lora: .* is not name=value \(argument lora=, --lora or AENGINE_LORA\)"
        ):
            configure(EngineConfig, {}, lora=text)


def test_api_keys_come_as_a_list_and_are_never_shown() -> None:
    assert configure(ServerConfig, {"AENGINE_API_KEYS": "one, two"}).api_keys == ("one", "two")
    assert configure(ServerConfig, {}, api_keys="one").api_keys == ("one",)  # as from a command line
    for keys in (("secret", ""), ("secret", 3)):
        with pytest.raises(ConfigError, match="api_keys") as caught:
            configure(ServerConfig, {}, api_keys=keys)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("0.5", 0.5), ("1", 1.0)])
def test_a_fraction_may_come_without_its_zero(text: str, number: float) -> None:
    assert configure(EngineConfig, {"AENGINE_GPU_MEMORY_UTILIZATION": text}).gpu_memory_utilization == number
    assert configure(EngineConfig, {}, gpu_memory_utilization=text, model=".5").model == ".5"


@pytest.mark.parametrize("text", [",", " ", " , "])
def test_a_door_that_was_to_be_locked_is_never_left_open(text: str) -> None:
    with pytest.raises(ConfigError, match="AENGINE_API_KEYS is set but names no key"):
        configure(ServerConfig, {"AENGINE_API_KEYS": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", -1),
        ("max_model_len", "many"),
        ("dtype", "int8"),
        ("gpu_memory_utilization", 1.5),
        ("max_num_seqs", 0),
        ("lookahead", "perhaps"),
    ],
)
def test_a_bad_value_names_the_knob_and_both_ways_to_set_it(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(EngineConfig, {}, **{name: value})
    for part in (name, f"AENGINE_{name.upper()}", repr(value)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EngineConfig, "torch_threads", 100_000),
        (EngineConfig, "kv_cache_gib", 1e9),
        (EngineConfig, "seed", 2**64),
        (ListenConfig, "backlog", 10**12),
    ],
)
def test_a_number_that_no_machine_has_is_refused(kind: type[Kind], name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: Expected .* (<=|<) \d+"):
        configure(kind, {}, **{name: value})


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_refused_by_every_knob(text: str) -> None:
    for kind in (EngineConfig, ServerConfig, ListenConfig):
        for knob in msgspec.structs.fields(kind):
            if "float" in str(knob.type):
                with pytest.raises(ConfigError, match=rf"^{knob.name}: .*{text}"):
                    configure(kind, {f"AENGINE_{knob.name.upper()}": text})


def test_an_unknown_knob_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen.*max_model_len"):
        configure(EngineConfig, {}, max_modellen=3)


@pytest.mark.parametrize(
    ("knob", "value", "choices"),
    [("tensor_parallel_size", 3, "auto, 1, 2, 4, 8"), ("kv_cache_dtype", "int8", "auto, fp8")],
)
def test_a_choice_that_there_is_not_is_answered_with_those_there_are(knob: str, value: object, choices: str) -> None:
    with pytest.raises(ConfigError, match=f"{knob}: must be one of {choices}, got {value!r}"):
        configure(EngineConfig, **{knob: value})
