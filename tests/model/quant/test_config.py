"""The quantisation settings of config.json, as checkpoints have them, and settings that are refused."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import EngineConfig
from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.fields import Fields
from aengine.model.quant.base import LinearFormat, QuantConfig
from aengine.model.quant.config import METHODS, read_quantization
from aengine.model.quant.formats.awq import Awq, AwqGemv
from aengine.model.quant.formats.bitsandbytes import BitsAndBytes4, BitsAndBytes8
from aengine.model.quant.formats.fp8 import Fp8
from aengine.model.quant.formats.gptq import Gptq, Gptq8
from aengine.model.quant.formats.int_quantized import IntQuantized
from aengine.model.quant.formats.mxfp4 import Mxfp4, Mxfp4Matrix
from aengine.model.quant.formats.mxfp8 import Mxfp8
from aengine.model.quant.formats.nvfp4 import Nvfp4
from aengine.model.quant.formats.pack_quantized import PackQuantized, PackQuantized8

from .schemes import SCHEMES

QKV = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
UP = "model.layers.0.mlp.up_proj"


def read(config: object, key: str = "quantization_config") -> QuantConfig:
    quant = read_quantization(Fields({key: config}, "config.json"))
    assert quant is not None
    return quant


def changed(scheme: str, path: str = "", **changes: object) -> dict[str, object]:
    """Return the scheme's settings with changes below `path`, such as "config_groups.group_0.weights"."""
    config = json.loads(json.dumps(SCHEMES[scheme].config))
    section = config
    for key in path.split(".") if path else ():
        section = section[key]
    section.update(changes)
    return dict(config)


WEIGHTS, INPUTS = "config_groups.group_0.weights", "config_groups.group_0.input_activations"


def test_without_a_word_of_it_nothing_is_quantised() -> None:
    assert read_quantization(Fields({}, "config.json")) is None
    assert read_quantization(Fields({"quantization_config": None}, "config.json")) is None


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("fp8-blocks", Fp8((128, 128), "group", "weight_scale_inv")),
        ("fp8-tensor-static", Fp8((0, 0), "static", "weight_scale_inv", "activation_scale")),
        ("autofp8", Fp8((0, 0), "static")),
        ("ct-fp8-channel", Fp8((1, 0), "token")),
        ("ct-fp8-tensor-static", Fp8((0, 0), "static")),
        ("ct-fp8-block", Fp8((128, 128), "group")),
        ("modelopt-nvfp4", Nvfp4(compressed=False)),
        ("modelopt-nvfp4-beside", Nvfp4(compressed=False)),
        ("modelopt-fp8", Fp8((0, 0), "static")),
        ("modelopt-fp8-channel", Fp8((1, 0), "token")),
        ("ct-nvfp4", Nvfp4(compressed=True)),
        ("ct-nvfp4a16", Nvfp4(compressed=True)),
        ("ct-int4", PackQuantized(32, symmetric=True)),
        ("ct-int4-zeros", PackQuantized(16, symmetric=False)),
        ("ct-int4-channel", PackQuantized(-1, symmetric=True)),
        ("ct-int8-packed", PackQuantized8(-1, symmetric=True)),
        ("ct-int8-packed-zeros", PackQuantized8(32, symmetric=False)),
        ("ct-int8", IntQuantized(channels=True)),
        ("ct-int8-zeros", IntQuantized(channels=True)),
        ("ct-int8-tensor", IntQuantized(channels=False)),
        ("gptq-int8", Gptq8(32, ordered=True)),
        ("gptq-int8-asymmetric", Gptq8(16, 2)),
        ("ct-mxfp4", Mxfp4Matrix("weight_packed")),
        ("ct-mxfp8", Mxfp8()),
        ("modelopt-mxfp8", Mxfp8()),
        ("modelopt-mxfp4", Mxfp4Matrix("weight")),
        ("bnb-nf4", BitsAndBytes4("nf4", nested=True)),
        ("bnb-nf4-plain", BitsAndBytes4("nf4", nested=False)),
        ("bnb-int8", BitsAndBytes8()),
        ("auto-round", Gptq(16)),
        ("fbgemm-fp8", Fp8((1, 0), "token")),
        ("awq", Awq(32)),
        ("awq-gemv", AwqGemv(32)),
        ("gptq", Gptq(16)),
        ("gptq-asymmetric", Gptq(-1)),
        ("gptq-desc-act", Gptq(16, ordered=True)),
        ("gptq-v2", Gptq(16, 2, ordered=True)),
    ],
)
def test_every_scheme_is_read_as_its_format(scheme: str, expected: object) -> None:
    quant = read(SCHEMES[scheme].config)
    assert quant.format_of(*QKV) == expected
    assert quant.format_of("lm_head") is None


def test_mxfp4_is_for_experts_alone() -> None:
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quant = read({"quant_method": "mxfp4", "modules_to_not_convert": names})
    assert quant.format_of("model.layers.3.mlp.experts.gate_up_proj") == Mxfp4()
    assert quant.format_of(*QKV) is None
    assert quant.format_of("lm_head") is None


@pytest.mark.parametrize("name", ["e4m3", "float8_e4m3fn"])
def test_names_of_e4m3(name: str) -> None:
    assert read(changed("fp8-blocks", fmt=name)).format_of(UP) == Fp8((128, 128), "group", "weight_scale_inv")


def test_older_spellings() -> None:
    older = {
        "quant_method": "compressed_tensors",
        "format": "naive-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "group_size": 128},
            }
        },
    }
    for config in (older, {"quantization_config": older}, {**older, "quant_method": None}):
        assert read(config, "compression_config").format_of(UP) == Fp8((128, 128), "group")
    assert read(changed("awq", format="gemm", version=None)).format_of(UP) == Awq(32)
    assert read(changed("awq", version="GEMM")).format_of(UP) == Awq(32)
    assert read(changed("gptq", format="gptq_v2")).format_of(UP) == Gptq(16, 2)
    assert read(changed("gptq", lm_head=True)).format_of("lm_head") == Gptq(16)


def test_strategies_that_are_left_to_the_group_size() -> None:
    args = {"num_bits": 4, "type": "int", "symmetric": True}
    for size, expected in ((64, 64), (-1, -1)):
        config = changed("ct-int4", "config_groups.group_0", weights={**args, "group_size": size})
        assert read(config).format_of(UP) == PackQuantized(expected, symmetric=True)


def test_groups_are_chosen_by_name_then_pattern_then_class() -> None:
    config = changed("ct-int4", format="mixed-precision")
    fp8 = json.loads(json.dumps(SCHEMES["ct-fp8-channel"].config))["config_groups"]["group_0"]
    int4 = json.loads(json.dumps(config))["config_groups"]["group_0"]
    config["config_groups"] = {
        "a": {**fp8, "targets": ["Linear"], "format": "float-quantized"},
        "b": {**int4, "targets": ["re:.*mlp.*"], "format": "pack-quantized"},
        "c": {**fp8, "targets": ["model.layers.1.mlp.down_proj"], "format": "float-quantized"},
    }
    quant = read(config)
    assert quant.format_of(*QKV) == Fp8((1, 0), "token")
    assert quant.format_of(UP) == PackQuantized(32, symmetric=True)
    assert quant.format_of("model.layers.1.mlp.down_proj") == Fp8((1, 0), "token")


def test_inputs_of_packed_integers_stay_in_floats() -> None:
    config = changed("ct-int4", "config_groups.group_0", input_activations={"num_bits": 8, "type": "float"})
    assert read(config).format_of(UP) == PackQuantized(32, symmetric=True)


def test_ignored_modules_stay_as_they_are() -> None:
    quant = read(changed("ct-int4", ignore=["lm_head", "re:.*self_attn.*", UP]))
    assert quant.format_of(*QKV) is None
    assert quant.format_of(UP) is None
    assert quant.format_of("model.layers.1.mlp.up_proj") is not None
    assert quant.format_of("model.lm_head_of_another") is not None, "whole names, not parts"
    assert read(changed("ct-int4", ignore=None)).format_of("lm_head") is not None, "nothing else says so"


def test_gptq_modules() -> None:
    some = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    quant = read(changed("gptq", modules_in_block_to_quantize=some))
    assert quant.format_of(*QKV) is not None
    assert quant.format_of(UP) is None
    quant = read(changed("gptq", dynamic={"-:.*self_attn": {}, "-:model\\.layers\\.1\\.": {}}))
    assert quant.format_of(*QKV) is None
    assert quant.format_of(UP) is not None
    assert quant.format_of("model.layers.1.mlp.up_proj") is None


def test_what_is_fused_must_have_one_format() -> None:
    quant = read(changed("awq", modules_to_not_convert=["k_proj"]))
    with pytest.raises(UnsupportedModelError, match=r"q_proj is AWQ, groups of 32, .*k_proj is not quantised"):
        quant.format_of(*QKV)


def test_scales_of_keys_and_values() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert not read(SCHEMES["ct-int4"].config).kv_scales
    assert read(changed("ct-int4", kv_cache_scheme=scheme)).kv_scales
    assert not read(changed("ct-int4", kv_cache_scheme={**scheme, "dynamic": True})).kv_scales
    with pytest.raises(UnsupportedModelError, match="kv_cache_scheme: type 'int' with num_bits 8"):
        read(changed("ct-int4", kv_cache_scheme={**scheme, "type": "int"}))


@pytest.mark.parametrize("method", ["nvfp4", "quark", "torchao", "hqq", "FP9", None])
def test_an_unknown_method_is_refused_with_those_that_are_known(method: str | None) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read({"quant_method": method})
    assert str(error.value).endswith(f"; use an edition of the model in floats or in one of: {', '.join(METHODS)}")
    assert str(error.value).startswith("config.json: quantization_config: quant_method ")


def test_the_knob_takes_every_method() -> None:
    field = next(one for one in msgspec.structs.fields(EngineConfig) if one.name == "quantization")
    assert {*get_args(get_args(field.type)[0])} == {"auto", *METHODS}


def test_modelopt_is_known_by_its_key_and_by_longer_names() -> None:
    groups = {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}}
    for method in ({}, {"quant_method": "modelopt_fp4"}, {"quant_method": "modelopt_mixed"}):
        quant = read({"config_groups": groups, "quant_algo": "FP8", "producer": {"name": "modelopt"}, **method})
        assert (quant.method, quant.format_of(UP)) == ("modelopt", Fp8((0, 0), "static"))


def test_modules_that_modelopt_excludes() -> None:
    excluded = ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate", "model.layers.3", "model.*.mlp.up_*"]
    quant = read({"quantization": {"quant_algo": "NVFP4", "exclude_modules": excluded}})
    assert quant.format_of(*QKV) is None
    assert quant.format_of("model.layers.3.mlp.down_proj", UP, "model.layers.0.mlp.gate", "lm_head") is None
    names = "model.layers.1.mlp.down_proj", "model.layers.30.mlp.gate_proj", "model.layers.1.self_attn.q_proj"
    assert quant.format_of(*names) == Nvfp4(compressed=False)


def test_auto_round_with_other_bits_in_single_modules() -> None:
    extra = {"model.layers.0.mlp.down_proj": {"bits": 8}, ".*self_attn.*": {"bits": 16}}
    quant = read(changed("auto-round", extra_config=extra))
    assert quant.format_of("model.layers.0.mlp.down_proj") == Gptq8(16)
    assert quant.format_of(UP) == Gptq(16)
    assert quant.format_of(*QKV) is None
    assert read(changed("auto-round", packing_format="auto_round:auto_awq")).format_of(UP) == Awq(16)


def test_modelopt_with_several_algorithms() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    quant = read({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert quant.format_of(QKV[0]) == Fp8((0, 0), "static")
    assert quant.format_of("model.layers.0.mlp.experts.3.up_proj") == Nvfp4(compressed=False)
    assert quant.format_of(QKV[1], UP) is None


def test_modelopt_that_quantises_keys_and_values_alone() -> None:
    assert (
        read_quantization(Fields({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "")) is None
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed("fp8-blocks", fmt="e5m2"), "fmt 'e5m2'"),
        (changed("fp8-blocks", expert_dtype="fp4"), "expert_dtype 'fp4'"),
        (changed("fp8-blocks", modules_to_convert=["model.embed_tokens"]), "modules_to_convert"),
        (changed("fp8-blocks", activation_scheme="static"), "activation_scheme static with weight_block_size"),
        (changed("fp8-blocks", activation_scheme="none"), "activation_scheme 'none'"),
        (changed("fp8-blocks", weight_block_size=[128, 64]), r"weight_block_size \[128, 64\]"),
        (changed("fp8-blocks", weight_block_size=[96, 128]), r"weight_block_size \[96, 128\]"),
        (changed("modelopt-nvfp4", quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ'"),
        (changed("modelopt-nvfp4", quant_algo="W4A8_AWQ"), "quant_algo 'W4A8_AWQ'"),
        (changed("modelopt-nvfp4", WEIGHTS, group_size=32), "NVFP4 with group_size 32"),
        (changed("modelopt-nvfp4-beside", "quantization", group_size=32), "NVFP4 with group_size 32"),
        (changed("modelopt-nvfp4", kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo 'NVFP4'"),
        (changed("ct-nvfp4", WEIGHTS, group_size=32), "strategy 'tensor_group' with group_size 32 of NVFP4"),
        (changed("ct-nvfp4", WEIGHTS, strategy="group"), "strategy 'group' with group_size 16 of NVFP4"),
        (changed("ct-nvfp4", WEIGHTS, symmetric=False), "NVFP4 with symmetric false"),
        (changed("auto-round", packing_format="auto_round:llm_compressor"), "packing_format 'llm_compressor'"),
        (changed("auto-round", data_type="mx_fp"), "data_type 'mx_fp'"),
        (changed("auto-round", bits=2), "AutoRound with bits 2"),
        (changed("bnb-nf4", bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type 'int4'"),
        (changed("bnb-nf4", bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage 'bfloat16'"),
        (changed("bnb-nf4", load_in_4bit=False), "bitsandbytes with neither load_in_4bit nor load_in_8bit"),
        (changed("awq", bits=3), "AWQ with bits 3"),
        (changed("awq", version="gemv_fast"), "version 'gemv_fast' of AWQ"),
        (changed("awq", zero_point=False), "AWQ with zero_point false"),
        (changed("awq", group_size=12), "group_size 12"),
        (changed("awq", group_size=0), "group_size 0"),
        (changed("gptq", bits=3), "GPTQ with bits 3"),
        (changed("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin' of GPTQ"),
        (changed("gptq", is_marlin_format=True), "is_marlin_format"),
        (changed("gptq", pack_dtype="int64"), "pack_dtype 'int64'"),
        (changed("gptq", dynamic={".*down_proj": {"bits": 8}}), "dynamic: '.*down_proj': settings of single modules"),
        (changed("ct-int4", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config that changes weights"),
        (changed("ct-int4", transform_config={"config_groups": {}}), "transform_config that changes weights"),
        (changed("ct-int4", format="marlin-24"), "format 'marlin-24' of int with 4 bits"),
        (changed("ct-int4", WEIGHTS, num_bits=2), "type 'int' with num_bits 2"),
        (changed("ct-int8", WEIGHTS, strategy="group"), "strategy 'group' of int8"),
        (changed("ct-int8-packed", format="marlin-24"), "format 'marlin-24' of int with 8 bits"),
        (changed("ct-mxfp4", WEIGHTS, group_size=16), "strategy 'group' with group_size 16 of mxfp4-pack-quantized"),
        (changed("ct-mxfp8", WEIGHTS, strategy="channel"), "strategy 'channel' with group_size 32 of mxfp8-quantized"),
        (changed("ct-int4", WEIGHTS, type="float"), "format 'pack-quantized' of float with 4 bits"),
        (changed("ct-int4", WEIGHTS, strategy="tensor"), "strategy 'tensor' of int4"),
        (changed("ct-int4", WEIGHTS, dynamic=True), "dynamic true for weights"),
        (changed("ct-int4", "config_groups.group_0", output_activations={"num_bits": 8}), "output_activations"),
        (changed("ct-fp8-block", WEIGHTS, symmetric=False), "FP8 with symmetric false"),
        (changed("ct-fp8-block", WEIGHTS, strategy="group"), "strategy 'group' of FP8"),
        (changed("ct-fp8-block", WEIGHTS, block_structure=[128, 32]), r"block_structure \[128, 32\]"),
        (changed("ct-fp8-block", INPUTS, group_size=64), "strategy 'group', dynamic"),
        (changed("ct-fp8-channel", INPUTS, strategy="group", group_size=128), "strategy 'group', dynamic"),
        (changed("ct-fp8-channel", INPUTS, dynamic=False), "strategy 'token', static"),
        (changed("ct-fp8-channel", INPUTS, type="int"), "type 'int' with num_bits 8"),
        (changed("ct-fp8-channel", "config_groups.group_0", input_activations=None), "FP8 without input_activations"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{words}.* is not supported, only "):
        read(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "quantization_config must be an object"),
        (changed("fp8-blocks", weight_block_size=[128]), "weight_block_size must be a list of 2 integers"),
        (changed("fp8-blocks", weight_block_size=[True, 128]), "weight_block_size must be a list of 2 integers"),
        (changed("fp8-blocks", weight_block_size="128"), "weight_block_size must be a list of 2 integers"),
        (changed("fp8-blocks", modules_to_not_convert=[1]), "modules_to_not_convert must be a list of strings"),
        (changed("gptq", group_size="all"), "group_size must be an integer"),
        (changed("gptq", group_size=-2), "group_size must be an integer from -1"),
        (changed("gptq", modules_in_block_to_quantize=["q_proj"]), "modules_in_block_to_quantize must be a list of"),
        (changed("gptq", dynamic=["-:a"]), "dynamic must be an object"),
        (changed("gptq", dynamic={"-:(": {}}), "dynamic has an invalid pattern"),
        (changed("ct-int4", config_groups={}), "config_groups is missing or empty"),
        (changed("ct-int4", config_groups={"FP8": ["Linear"]}), "FP8 must be an object"),
        (changed("ct-int4", "config_groups.group_0", weights=None), "weights is missing"),
        (changed("ct-int4", "config_groups.group_0", targets="Linear"), "targets must be a list of strings"),
        (changed("ct-int4", WEIGHTS, group_size=None), "group_size is missing"),
        (changed("ct-int4", WEIGHTS, num_bits=True), "num_bits must be an integer"),
        (changed("ct-fp8-block", WEIGHTS, block_structure="128xx"), "block_structure must be a list of 2 integers"),
        (changed("ct-int4", ignore=["re:(.*a)+"]), "ignore has a pattern that repeats groups"),
        (changed("ct-int4", ignore=["re:" + ".*" * 9]), "ignore has a pattern that repeats"),
        (changed("ct-int4", ignore=["re:" + "a" * 4096]), "ignore has a pattern of 4096 characters"),
        (changed("ct-int4", ignore=["re:[a"]), "ignore has an invalid pattern"),
        (changed("ct-int4", ignore=["re:a{99999999999999}"]), "ignore has an invalid pattern"),
        (changed("ct-fp8-channel", INPUTS, dynamic="local"), "dynamic must be true or false, is 'local'"),
    ],
)
def test_values_that_no_checkpoint_has_are_errors_that_name_file_and_key(config: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json.*{words}"):
        read(config)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["Linear", "re:a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
def test_no_value_anywhere_raises_anything_else(scheme: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(SCHEMES[scheme].config))
    section = config
    while True:
        key = data.draw(st.sampled_from(sorted(section)))
        if not isinstance(section[key], dict) or data.draw(st.booleans()):
            break
        section = section[key]
    section[key] = data.draw(anything)
    try:
        quant = read_quantization(Fields({"quantization_config": config}, "config.json"))
    except CheckpointError:
        return
    assert quant is None or quant.format_of(UP) is None or isinstance(quant.format_of(UP), LinearFormat)
