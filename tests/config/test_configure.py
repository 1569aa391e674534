"""Configs from arguments and the environment; errors name the knob and where it was set."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import configure, suggestion
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
            ConfigError, match=rf"^lora: must be pairs of name=value, .* got {text!r} \(argument lora=\)"
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
    with pytest.raises(ConfigError, match=r"^api_keys: it is set but names no key; .* \(AENGINE_API_KEYS\)"):
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
def test_a_bad_value_names_the_knob_and_where_it_was_set(name: str, value: object) -> None:
    for given, environ, place in (
        ({name: value}, {}, rf"argument {name}="),
        ({}, {f"AENGINE_{name.upper()}": str(value)}, f"AENGINE_{name.upper()}"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name}: .*, got .*{value}.* \({place}\)$"):
            configure(EngineConfig, environ, **given)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"AENGINE_MAX_NUM_SEQ": "4"}, r"AENGINE_MAX_NUM_SEQ \(did you mean AENGINE_MAX_NUM_SEQS\?\)"),
        ({"AENGINE_MAX_NUM_BATCHED_TOKENS": "4"}, r"\(did you mean AENGINE_MAX_STEP_TOKENS\?\)"),
        ({"AENGINE_ENFORCE_EAGER": "1"}, r"\(did you mean AENGINE_CUDA_GRAPHS=false\?\)"),
        ({"AENGINE_Y": "1", "AENGINE_Z": "2"}, r"unknown variables AENGINE_Y, AENGINE_Z; correct or unset them"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(variables: dict[str, str], told: str) -> None:
    for kind in (EngineConfig, ServerConfig, ListenConfig):
        with pytest.raises(ConfigError, match=told):
            configure(kind, variables)


def test_variables_of_other_configs_and_of_services_called_aengine_are_left_alone() -> None:
    environ = {
        "AENGINE_REPLICAS": "2",
        "AENGINE_MAX_STEP_TOKEN": "",  # empty is unset
        "AENGINE_API_KEY": "of clients",
        "AENGINE_PAGE": "false",
        "AENGINE_PORT": "tcp://10.0.0.1:8000",
        "AENGINE_SERVICE_HOST": "10.0.0.1",
        "AENGINE_SERVICE_PORT_HTTP": "8000",
        "AENGINE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "AENGINE_QWEN_PORT": "tcp://10.0.0.2:8000",
    }
    assert configure(EngineConfig, environ) == EngineConfig()
    assert configure(ListenConfig, environ) == ListenConfig()
    with pytest.raises(ConfigError, match="AENGINE_QWEN_PORT"):
        configure(EngineConfig, {"AENGINE_QWEN_PORT": "9000"})


def test_the_clients_key_is_a_servers_key_too() -> None:
    assert configure(ServerConfig, {"AENGINE_API_KEY": "a,b"}).api_keys == ("a,b",)
    assert configure(ServerConfig, {"AENGINE_API_KEY": "one", "AENGINE_API_KEYS": "two"}).api_keys == ("two",)


@pytest.mark.parametrize(
    ("text", "number"), [("64MiB", 2**26), ("1.5 KiB", 1536), ("32K", 2**15), ("32k", 32_000), ("64MB", 64_000_000)]
)
def test_whole_numbers_may_have_units(text: str, number: int) -> None:
    assert configure(ServerConfig, {"AENGINE_MAX_BODY_BYTES": text}).max_body_bytes == number
    assert configure(EngineConfig, {}, max_model_len=text).max_model_len == number


@pytest.mark.parametrize("text", ["64 apples", "1.5", "0.3k5", "1.0001k"])
def test_a_bad_number_with_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^max_model_len: Expected .*got {text!r}"):
        configure(EngineConfig, {}, max_model_len=text)


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("dtype", "half", "float16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("load_format", "safetensors", "auto"),
        ("quantization", "awq_marlin", "awq"),
    ],
)
def test_vllms_words_for_the_same_value_are_taken(knob: str, text: str, value: str) -> None:
    assert getattr(configure(EngineConfig, {}, **{knob: text}), knob) == value


@pytest.mark.parametrize("text", ["a, b", '["a", "b"]'])
def test_a_model_may_have_several_names(text: str) -> None:
    assert configure(ServerConfig, {"AENGINE_SERVED_MODEL_NAME": text}).served_model_name == ("a", "b")
    assert ServerConfig(served_model_name="a").served_model_name == ("a",)  # type: ignore[arg-type]  # as a program may


def test_a_models_folder_is_named_by_its_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "qwen"
    folder.mkdir()
    assert EngineConfig(model=f"{folder}/").model_names == ("qwen", f"{folder}/", str(folder))
    monkeypatch.chdir(tmp_path)
    assert EngineConfig(model="./qwen").model_names == ("qwen", "./qwen", str(folder))
    assert EngineConfig(model="Qwen/Qwen3-8B").model_names == ("Qwen/Qwen3-8B",)
    assert EngineConfig().model_names == ("aengine-demo",)


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
def test_nan_and_infinity_are_refused_by_every_knob(text: str) -> None:
    for kind in (EngineConfig, ServerConfig, ListenConfig):
        for knob in msgspec.structs.fields(kind):
            if "float" in str(knob.type):
                with pytest.raises(ConfigError, match=rf"^{knob.name}: .*{text}"):
                    configure(kind, {f"AENGINE_{knob.name.upper()}": text})


def test_an_unknown_knob_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'max_modellen' \(did you mean max_model_len\?\); known knobs are chat_template,"
    ):
        configure(EngineConfig, {}, max_modellen=3)
    with pytest.raises(ConfigError, match=r"\(did you mean max_step_tokens\?\)"):
        configure(EngineConfig, {}, max_num_batched_tokens=3)
    with pytest.raises(ConfigError, match=r"\(the model decides how it takes images; leave it out"):
        configure(EngineConfig, {}, mm_processor_kwargs={})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("allowed_headers", "every method and header"),
        ("allowed_methods", "every method and header"),
        ("code_revision", "never run"),
        ("cuda_graph_max_bs", "not needed"),
        ("cuda_graph_sizes", "not needed"),
        ("dist_timeout", "not needed"),
        ("dp_size", "Ray Serve"),
        ("enable_tokenizer_info_endpoint", "did you mean tokenizer_info?"),
        ("ep", "divides the experts"),
        ("grammar_backend", "not needed"),
        ("kv_cache_metrics", "/metrics"),
        ("kv_offloading_size", "did you mean host_cache_gib?"),
        ("language_model_only", "set images to off"),
        ("mamba_cache_dtype", "did you mean state_dtype?"),
        ("max_log_len", "never logged"),
        ("max_total_tokens", "did you mean num_pages?"),
        ("reasoning_config", "from the chat template"),
        ("skip_tokenizer_init", "in the model's folder"),
        ("ssl_cert_reqs", "not asked for certificates"),
        ("tokenizer_path", "in the model's folder"),
        ("tokenizer_revision", "in the model's folder"),
        ("worker_cls", "not needed"),
    ],
)
def test_a_flag_of_another_engine_is_not_taken_for_a_knob_with_a_similar_name(name: str, hint: str) -> None:
    knobs = [knob for kind in (EngineConfig, ServerConfig, ListenConfig) for knob in kind.__struct_fields__]
    assert hint in suggestion(name, knobs, str)


@pytest.mark.parametrize(
    ("knob", "value", "choices"),
    [("tensor_parallel_size", 3, "auto, 1, 2, 4, 8"), ("kv_cache_dtype", "int8", "auto, fp8")],
)
def test_an_unknown_choice_is_answered_with_the_known_ones(knob: str, value: object, choices: str) -> None:
    with pytest.raises(ConfigError, match=f"{knob}: must be one of {choices}, got {value!r}"):
        configure(EngineConfig, **{knob: value})
