"""Reading config.json in its newer and older forms, and the errors that name what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import CheckpointError, ConfigError, UnsupportedModelError
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.model.config import ModelConfig
from aengine.model.families import FAMILIES

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def read(folder: Path, changes: dict[str, object], without: tuple[str, ...] = ()) -> ModelConfig:
    values = {key: value for key, value in {**QWEN3, **changes}.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(folder)


def test_old_and_new_spelling_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read(tmp_path, {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = read(
        tmp_path, {"dtype": "bfloat16", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    )
    assert old == new
    assert new.dtype == "bfloat16"
    rope = new.layers[0].attention.rope
    assert rope is not None
    assert (rope.type, rope.theta, rope.original_positions) == ("llama3", 5e5, 64)


def test_head_dim_follows_from_the_width_where_the_file_is_silent(tmp_path: Path) -> None:
    def head_dim(changes: dict[str, object], without: tuple[str, ...] = ()) -> int:
        return read(tmp_path, changes, without).layers[0].attention.head_dim

    assert head_dim({"architectures": ["Qwen2ForCausalLM"]}, without=("head_dim",)) == 16
    assert head_dim({"head_dim": None, "architectures": ["LlamaForCausalLM"]}) == 16
    assert head_dim({}, without=("head_dim",)) == 128  # Qwen3's default


def test_a_layers_products_are_its_parameters_but_for_its_norms(tmp_path: Path) -> None:
    config = read(tmp_path, {})
    layer = config.layers[0]
    assert layer.linears(64) == ((256, 64), (64, 128), (192, 64), (64, 96))
    assert sum(n * k for n, k in layer.linears(64)) == layer.parameters(64) - 2 * 64 - 2 * 32
    assert layer.linears(64, 2) == ((128, 64), (64, 64), (96, 64), (64, 48))
    assert layer.linears(64, 4) == ((96, 64), (64, 32), (48, 64), (64, 24))  # two KV heads, each on two ranks


def test_fp8_is_a_format_of_the_checkpoint_or_of_its_loading(tmp_path: Path) -> None:
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    codes = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    fp8, int4 = (read(tmp_path, {"quantization_config": one}) for one in (blocks, codes))
    assert (fp8.weight_classes, fp8.has_4_bits) == ({Fp8Weight}, False)
    assert (int4.weight_classes, int4.has_4_bits) == ({Int4Weight}, True)
    assert (read(tmp_path, {}).weight_classes, read(tmp_path, {}).has_4_bits) == (set(), False)
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    assert read(tmp_path, {"quantization_config": nvfp4}).has_4_bits
    assert read(tmp_path, {}).quantized_as("fp8").weight_classes == {Fp8Weight}
    with pytest.raises(ConfigError, match="gptq was asked for, the checkpoint has floats; use auto or fp8"):
        read(tmp_path, {}).quantized_as("gptq")


def test_copies_of_4_bit_matrices_take_their_room_and_others_have_none(tmp_path: Path) -> None:
    packed = read(tmp_path, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}})
    both = packed.with_unpacked_copies()
    dense = read(tmp_path, {})
    linears = sum(n * k for layer in dense.layers for n, k in layer.linears(dense.hidden_size))
    assert both.weight_bytes(torch.bfloat16) == packed.weight_bytes(torch.bfloat16) + 2 * linears
    assert both.spread_over(2).weight_bytes(torch.bfloat16) == both.weight_bytes(torch.bfloat16) // 2
    experts = read(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})  # as gpt-oss has them
    for config in (dense, experts):
        with pytest.raises(ConfigError, match="the checkpoint has no matrices of 4 bits outside experts; leave"):
            config.with_unpacked_copies()


def test_old_llama_files_name_no_kv_heads(tmp_path: Path) -> None:
    config = read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, without=("num_key_value_heads",))
    assert config.layers[0].attention.kv_heads == 4
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        read(tmp_path, {}, without=("num_key_value_heads",))


def test_an_unknown_architecture_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"nearest are Qwen3ForCausalLM, .*README\.md lists all"):
        read(tmp_path, {"architectures": ["Qwen3ForCasualLM"]})
    with pytest.raises(UnsupportedModelError, match="'Evil'] is not supported; \"Families\""):
        read(tmp_path, {"architectures": ["Evil"]})


def test_a_known_family_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    for name, why in (
        ("DeepseekV32ForCausalLM", "an index chooses"),
        ("GlmMoeDsaForCausalLM", "an index chooses"),
        ("DeepseekV4ForCausalLM", "several streams"),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"'{name}'\] is not supported: .*{why}.*\"Refused families\""):
            read(tmp_path, {"architectures": [name]})


@pytest.mark.parametrize(
    ("architecture", "flags", "qkv", "out", "mlp"),
    [
        ("Qwen3ForCausalLM", True, True, True, False),
        ("Qwen3ForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("LlamaForCausalLM", True, True, True, True),
        ("LlamaForCausalLM", False, False, False, False),
        ("MistralForCausalLM", True, False, False, False),
    ],
)
def test_biases(tmp_path: Path, architecture: str, flags: bool, qkv: bool, out: bool, mlp: bool) -> None:
    config = read(tmp_path, {"architectures": [architecture], "attention_bias": flags, "mlp_bias": flags})
    layer = config.layers[0]
    assert (layer.attention.qkv_bias, layer.attention.out_bias, layer.ffn.bias) == (qkv, out, mlp)


def test_eos_and_bos(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [3, 5], "bos_token_id": 1}).eos_token_ids == (3, 5)
    config = read(tmp_path, {"eos_token_id": 7, "bos_token_id": None})
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), None)


def test_numbers_that_python_writes_and_json_does_not_know(tmp_path: Path) -> None:
    read(tmp_path, {"time_step_limit": [0.0, float("inf")], "nothing": float("nan")})
    assert "Infinity" in (tmp_path / "config.json").read_text()
    with pytest.raises(CheckpointError, match="rms_norm_eps must be a number from 0 to 1, is inf"):
        read(tmp_path, {"rms_norm_eps": float("inf")})


def test_settings_of_a_language_model_that_stand_apart_whatever_the_architecture(tmp_path: Path) -> None:
    nested = {"text_config": QWEN3, "vision_config": {}, "architectures": QWEN3["architectures"]}
    plain = read(tmp_path, {})
    assert read(tmp_path, nested, without=tuple(key for key in QWEN3 if key != "architectures")) == plain


class TestSlidingWindow:
    def windows(self, folder: Path, changes: dict[str, object], architecture: str) -> list[int | None]:
        config = read(folder, {"architectures": [architecture], **changes})
        return config.windows

    def test_mistral_uses_it_in_all_layers(self, tmp_path: Path) -> None:
        assert self.windows(tmp_path, {"sliding_window": 9}, "MistralForCausalLM") == [9, 9, 9]
        assert self.windows(tmp_path, {"sliding_window": None}, "MistralForCausalLM") == [None] * 3
        assert self.windows(tmp_path, {}, "MistralForCausalLM") == [4096] * 3

    def test_mistral_with_mixed_layers_is_refused(self, tmp_path: Path) -> None:
        types = ["full_attention", "sliding_attention", "full_attention"]
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            self.windows(tmp_path, {"sliding_window": 9, "layer_types": types}, "MistralForCausalLM")

    @pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    def test_qwen_uses_it_where_it_says(self, tmp_path: Path, architecture: str) -> None:
        on = {"use_sliding_window": True, "sliding_window": 9}
        types = ["full_attention", "sliding_attention", "full_attention"]
        assert self.windows(tmp_path, {"sliding_window": 9}, architecture) == [None] * 3
        assert self.windows(tmp_path, {**on, "max_window_layers": 2}, architecture) == [None, None, 9]
        assert self.windows(tmp_path, {**on, "layer_types": types}, architecture) == [None, 9, None]
        assert self.windows(tmp_path, {**on, "sliding_window": None}, architecture) == [None] * 3
        with pytest.raises(CheckpointError, match="layer_types asks for sliding attention"):
            self.windows(tmp_path, {"layer_types": types}, architecture)

    def test_llama_has_none(self, tmp_path: Path) -> None:
        assert (
            self.windows(tmp_path, {"sliding_window": 9, "use_sliding_window": True}, "LlamaForCausalLM") == [None] * 3
        )


class TestRefusedByName:
    @pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
    def test_other_architectures(self, tmp_path: Path, architectures: object) -> None:
        with pytest.raises(UnsupportedModelError, match=r"architecture.*lists all \d+$"):
            read(tmp_path, {"architectures": architectures})

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            (
                {"quantization_config": {"quant_method": "hqq"}},
                "quantization_config.*'hqq'.*fp8.*awq.*gptq",
            ),
            ({"is_causal": False}, "is_causal"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"swiglu_limit": 7.0}, "swiglu_limit"),
            ({"per_layer_config": {"1": {"intermediate_size": 64}}}, "per_layer_config"),
            ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "'dynamic'.*longrope"),
            ({"rope_scaling": {"rope_type": "axial"}}, "'axial'"),
            ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
            ({"quantization": {"group_size": 64, "bits": 4}}, "quantised for MLX, .*AWQ or GPTQ editions"),
        ],
    )
    def test_settings_that_would_change_the_result(
        self, tmp_path: Path, changes: dict[str, object], named: str
    ) -> None:
        with pytest.raises(UnsupportedModelError, match=named):
            read(tmp_path, changes)

    def test_linear_attention_alone(self, tmp_path: Path) -> None:
        heads = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
        heads |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
        changes = {**heads, **experts, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25}
        for name in (
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
        ):  # only every fourth layer attends, and there are three
            with pytest.raises(CheckpointError, match=r"full_attention_interval \(4\) leaves none of 3 layers"):
                read(tmp_path, {"architectures": [name], **changes})
            changes["num_hidden_layers"] = 4
            read(tmp_path, {"architectures": [name], **changes})
            with pytest.raises(CheckpointError, match="linear_conv_kernel_dim must be an integer from 4 to 4, is 3"):
                read(tmp_path, {"architectures": [name], **changes, "linear_conv_kernel_dim": 3})
            del changes["num_hidden_layers"]

    def test_a_quantisation_that_stands_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        beside = tmp_path / "hf_quant_config.json"
        beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
        quantized = read(tmp_path, {}).quantized
        assert quantized is not None
        assert (quantized.method, quantized.bits) == ("modelopt", 5)
        beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
        with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json: .*quant_algo 'W4A8_AWQ'"):
            read(tmp_path, {})


class TestHostileFiles:
    @pytest.mark.parametrize("key", [key for key in QWEN3 if key not in ("architectures", "head_dim")])
    @pytest.mark.parametrize("value", [-1, 0, 2**31, 2**200, 1.5, "8", True, [4], {}])
    def test_sizes_that_no_model_has(self, tmp_path: Path, key: str, value: object) -> None:
        with pytest.raises(CheckpointError, match=key):
            read(tmp_path, {key: value})

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
            ({"head_dim": 0}, "head_dim"),
            ({"head_dim": 31}, "head_dim"),
            ({"head_dim": 2**20}, "head_dim"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
            ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
            ({"rope_theta": 0}, "rope_theta"),
            ({"rope_scaling": []}, "rope_scaling"),
            ({"rope_scaling": {"rope_type": 3}}, "rope_type"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}, "rope_theta"),
            (
                {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 3}},
                "high_freq_factor",
            ),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
            ({"eos_token_id": 100}, "eos_token_id"),
            ({"eos_token_id": [1, "2"]}, "eos_token_id"),
            ({"bos_token_id": -1}, "bos_token_id"),
            ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
            ({"layer_types": ["full_attention"] * 2}, "layer_types"),
            ({"layer_types": "full_attention"}, "layer_types"),
            ({"dtype": 16}, "dtype"),
            ({"quantization_config": {"a\n\x1bb": {}, "bits": "x", "quant_method": "awq"}}, "bits"),
            ({"quantization_config": {"quant_method": "gptq", "dynamic": {"a\x1b": 1}}}, r"dynamic: 'a\\x1b'"),
        ],
    )
    def test_values_of_the_wrong_kind(self, tmp_path: Path, changes: dict[str, object], named: str) -> None:
        with pytest.raises(CheckpointError, match=named):
            read(tmp_path, changes)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"a": ' * 100_000, b"[" * 1_000_000, b'{"a": 1e999}']
    )
    def test_files_that_are_no_json_object(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            ModelConfig.from_folder(tmp_path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config\.json in this folder"):
            ModelConfig.from_folder(tmp_path)

    @given(
        changes=st.dictionaries(
            st.sampled_from(
                [*QWEN3, "rope_scaling", "rope_theta", "layer_types", "eos_token_id", "dtype", "hidden_act"]
            ),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), inner)
                ),
                max_leaves=5,
            ),
        ),
        architecture=st.sampled_from(list(FAMILIES)),
    )
    def test_anything_else_is_read_or_refused(
        self, tmp_path: Path, changes: dict[str, object], architecture: str
    ) -> None:
        with contextlib.suppress(CheckpointError):
            read(tmp_path, {"architectures": [architecture], **changes})
