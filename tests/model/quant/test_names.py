"""Lists of modules name what their writers mean."""

from __future__ import annotations

import time

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from aengine.model.fields import Fields
from aengine.model.quant.names import Names, compressed_tensors_names, hugging_face_names

MODULES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.shared_expert_gate",
    "model.layers.1.mlp.experts.0.gate_proj",
    "model.layers.11.mlp.experts.10.up_proj",
    "model.visual.blocks.0.attn.qkv",
]


def hugging_face(*texts: str) -> Names:
    return hugging_face_names(Fields({"modules_to_not_convert": list(texts)}, "config.json"), "modules_to_not_convert")


@pytest.mark.parametrize(
    "text",
    [
        "lm_head",
        "model.layers.1",
        "model.layers.1.mlp",
        "model.layers.*.mlp.gate",
        "model.layers.*.self_attn",
        "model.layers.(1|3).mlp",
        "mlp.gate",
        "up_proj",
        "expert_gate",
        "model.visual",
    ],
)
@pytest.mark.parametrize("module", MODULES)
def test_modules_to_not_convert_means_what_transformers_makes_of_it(text: str, module: str) -> None:
    assert (module in hugging_face(text)) is not should_convert_module(module, [text])


def test_words_within_a_name_count_too_as_autoawq_has_it() -> None:
    """transformers matches any part of a name. Lists mean whole words: the router "gate", and not "gate_proj"."""
    found = [module for module in MODULES if module in hugging_face("gate", "visual")]
    assert found == [
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_expert_gate",
        "model.visual.blocks.0.attn.qkv",
    ]


def test_names_of_weights_and_of_folders_are_names_of_modules() -> None:
    assert "lm_head" in hugging_face("lm_head.weight")
    assert "model.layers.1.mlp.gate" in hugging_face("model.layers.1.")
    assert "model.layers.11.mlp" not in hugging_face("model.layers.1.")
    assert "lm_head" not in hugging_face("", ".")


def test_compressed_tensors_takes_whole_names_patterns_and_a_class() -> None:
    fields = Fields({}, "config.json")
    names = compressed_tensors_names(fields, "ignore", ["lm_head", "re:.*mlp.gate$", "model.layers.1"])
    assert [module for module in MODULES if module in names] == ["lm_head", "model.layers.1.mlp.gate"]
    assert all(module in compressed_tensors_names(fields, "targets", ["Linear"]) for module in MODULES)
    assert not any(module in compressed_tensors_names(fields, "targets", []) for module in MODULES)


def test_the_slowest_pattern_that_is_let_through_is_fast_enough() -> None:
    names = compressed_tensors_names(Fields({}, "config.json"), "ignore", ["re:" + ".*.*.*.*!"])
    start = time.perf_counter()
    assert "model.layers.11.mlp.experts.127.up_proj" not in names
    assert time.perf_counter() - start < 0.1  # 2 ms; there may be 18,432 such modules


def test_numbers_of_layers_and_experts_do_not_count_as_repeats() -> None:
    texts = [r"re:.*\.layers\.[0-9]+\.mlp\.experts\.\d+\.(up|gate)_proj.*", r"re:(model\.)?.*\d{1,2}.*mlp.*"]
    names = compressed_tensors_names(Fields({}, "config.json"), "ignore", texts)
    assert "model.layers.11.mlp.experts.10.up_proj" in names
