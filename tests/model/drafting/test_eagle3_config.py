"""config.json of an EAGLE-3 head is read in two layouts, and a head that does not fit its target is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from aengine.cache.kv import KVLayer
from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.drafting.eagle3_config import read_eagle3
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import make_tensors
from tests.model.drafting.head_reference import write_changed as write

PLAIN = HeadSettings()
SPECULATORS = HeadSettings(speculators=True, norm_before_residual=True, layers=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96)
    return ModelConfig.from_folder(folder)


def with_layers(target: ModelConfig, count: int) -> ModelConfig:
    return msgspec.structs.replace(target, layers=target.layers[:1] * count)


def test_the_plain_layout(target: ModelConfig, tmp_path: Path) -> None:
    config = read_eagle3(write(tmp_path, PLAIN), target)
    assert (config.hidden_size, config.target_hidden_size, config.rms_norm_eps) == (64, 64, 1e-5)
    assert (config.draft_vocab_size, config.target_vocab_size, config.is_mapped) == (40, 96, True)
    assert (config.taps, config.first_layer, len(config.layers)) == ((1, 2, 3), "midlayer", 1)
    assert not config.norm_before_residual
    assert not config.has_embedding
    assert config.has_head


def test_the_layout_of_speculators(target: ModelConfig, tmp_path: Path) -> None:
    config = read_eagle3(write(tmp_path, SPECULATORS), target)
    assert (config.first_layer, len(config.layers), config.rms_norm_eps) == ("layers.0", 2, 1e-5)
    assert config.norm_before_residual  # the default


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "LlamaForCausalLM"])
def test_other_names_of_the_plain_layout(name: str, target: ModelConfig, tmp_path: Path) -> None:
    assert read_eagle3(write(tmp_path, PLAIN, architectures=[name]), target).taps == (1, 2, 3)


@pytest.mark.parametrize(("layers", "taps"), [(36, (2, 18, 33)), (61, (2, 30, 58)), (7, (2, 3, 4))])
@pytest.mark.parametrize("absent", [None, []])
def test_the_default_taps_depend_on_the_target(
    layers: int, taps: tuple[int, ...], absent: object, target: ModelConfig, tmp_path: Path
) -> None:
    folder = write(tmp_path, PLAIN, eagle_aux_hidden_state_layer_ids=absent)
    assert read_eagle3(folder, with_layers(target, layers)).taps == taps


def test_taps_are_in_ascending_order(target: ModelConfig, tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, eagle_aux_hidden_state_layer_ids=[4, 0, 2])
    assert read_eagle3(folder, target).taps == (0, 2, 4)


def test_without_a_draft_vocabulary_every_token_can_be_drafted(target: ModelConfig, tmp_path: Path) -> None:
    folder = write(tmp_path, HeadSettings(draft_vocab=96), draft_vocab_size=None)
    config = read_eagle3(folder, target)
    assert (config.draft_vocab_size, config.is_mapped) == (96, False)


def test_the_kv_pool_has_a_layer_for_each_layer_of_the_head(target: ModelConfig, tmp_path: Path) -> None:
    config = read_eagle3(write(tmp_path, SPECULATORS), target)
    assert config.kv_layers(1) == (KVLayer(2, 16), KVLayer(2, 16))
    assert config.kv_layers(2) == (KVLayer(1, 16), KVLayer(1, 16))
    assert config.spread_over(2) == 2
    assert config.spread_over(8) == 1  # there are four query heads
    assert config.kv_layers(8) == config.kv_layers(1)


def test_a_page_of_the_target_includes_the_head(target: ModelConfig, tmp_path: Path) -> None:
    head = read_eagle3(write(tmp_path, SPECULATORS), target)
    model = target.with_head(head)
    assert model.kv_shape(4, torch.bfloat16).layers == (KVLayer(4, 16),) * 4 + (KVLayer(2, 16),) * 2
    assert model.spread_over(2).kv_shape(4, torch.bfloat16).layers == (KVLayer(2, 16),) * 4 + (KVLayer(1, 16),) * 2
    assert model.spread_over(2).draft_kv_layers == head.kv_layers(2)


def test_a_model_with_a_head_is_sent_to_other_processes(target: ModelConfig, tmp_path: Path) -> None:
    """Processes that compile kernels ahead read it."""
    model = target.with_head(read_eagle3(write(tmp_path, SPECULATORS), target))
    assert msgspec.json.decode(msgspec.json.encode(model), type=ModelConfig) == model


def test_the_weights_of_the_target_include_the_head(target: ModelConfig, tmp_path: Path) -> None:
    """Norms are not counted."""
    head = read_eagle3(write(tmp_path, SPECULATORS), target)
    tensors = make_tensors(SPECULATORS)
    assert head.parameters == sum(one.numel() for one in tensors.values() if one.dim() == 2)
    plain, model = (one.weight_bytes(torch.bfloat16) for one in (target, target.with_head(head)))
    assert model - plain == 2 * head.parameters
    plain, model = (one.spread_over(2).weight_bytes(torch.bfloat16) for one in (target, target.with_head(head)))
    assert model - plain == head.parameters


def test_the_products_of_a_head(target: ModelConfig, tmp_path: Path) -> None:
    """Start-up warms their kernels."""
    config = read_eagle3(write(tmp_path, SPECULATORS), target)
    later = ((128, 64), (64, 64), (160, 64), (64, 80))  # of a Llama layer
    assert config.linears(1) == ((64, 192), (128, 128), *later[1:], *later)


def _layer(**changes: object) -> dict[str, object]:
    return {"transformer_layer_config": changes}


NO_FIT: dict[str, tuple[HeadSettings, dict[str, object], str]] = {
    "for another hidden size": (PLAIN, {"hidden_size": 32}, "hidden_size is 32, that of the model 64"),
    "for another target": (PLAIN, {"target_hidden_size": 96}, "target_hidden_size is 96, that of the model 64"),
    "for another vocabulary": (PLAIN, {"vocab_size": 1000}, "vocab_size is 1000, that of the model 96"),
    "drafting more than all tokens": (PLAIN, {"draft_vocab_size": 97}, "draft_vocab_size must be .* 1 to 96"),
    "a tap after the last layer": (
        PLAIN, {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "different layers from 0 to 4"
    ),
    "a tap twice": (PLAIN, {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, "different layers from 0 to 4"),
    "no taps for few layers": (PLAIN, {"eagle_aux_hidden_state_layer_ids": None}, "a model of 4 layers has no default"),
    "two kinds of norms": (SPECULATORS, {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc"),
    "no settings of layers": (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config is missing"),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[HeadSettings, dict[str, object], str]] = {
    "no architecture": (PLAIN, {"architectures": None}, "architectures is missing; supported are"),
    "EAGLE-1": (PLAIN, {"architectures": ["LlamaForCausalLMEagle"]}, "is no EAGLE-3 head; supported are"),
    "a language model": (
        PLAIN, {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "is no EAGLE-3 head.*draft=PATH"
    ),
    "DFlash": (SPECULATORS, {"speculators_model_type": "dflash"}, "'dflash' is not supported, only eagle3 and peagle"),
    "another kind of layer": (SPECULATORS, _layer(model_type="gemma3"), "model_type 'gemma3' .* llama and qwen3"),
    "only the last layer": (PLAIN, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    "a window": (SPECULATORS, _layer(layer_types=["sliding_attention"] * 2), "layer_types: sliding windows"),
    "longrope": (
        PLAIN,
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                          "original_max_position_embeddings": 8}},
        "longrope is not supported in draft heads",
    ),
    "quantised": (PLAIN, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_FIT)
def test_a_head_that_does_not_fit_the_target(case: str, target: ModelConfig, tmp_path: Path) -> None:
    settings, changes, error = NO_FIT[case]
    with pytest.raises(CheckpointError, match=error):
        read_eagle3(write(tmp_path, settings, **changes), target)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_head_of_another_kind(case: str, target: ModelConfig, tmp_path: Path) -> None:
    settings, changes, error = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=error):
        read_eagle3(write(tmp_path, settings, **changes), target)


def test_a_target_with_several_residual_streams(tmp_path: Path) -> None:
    write_checkpoint("gemma3n", tmp_path)
    streams = ModelConfig.from_folder(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"speculation: .* several; use ngram"):
        read_eagle3(write(tmp_path, PLAIN), streams)


@pytest.mark.parametrize(
    ("settings", "changes", "mask"),
    [
        (SPECULATORS, {"speculators_model_type": "peagle", "mask_token_id": 7}, 7),
        (PLAIN, {"parallel_drafting": True, "mask_token_id": 6}, 6),
        (PLAIN, {"ptd_token_id": 0}, 0),
        (PLAIN, {"eagle_config": {"pard_token": 5}}, 5),
        (PLAIN, {"mask_token_id": 7}, None),  # other kinds of heads have one, too
    ],
)
def test_a_head_for_parallel_drafts(
    settings: HeadSettings, changes: dict[str, object], mask: int | None, target: ModelConfig, tmp_path: Path
) -> None:
    assert read_eagle3(write(tmp_path, settings, **changes), target).mask_id == mask


def test_a_mask_among_the_tensors_shows_such_a_head(target: ModelConfig, tmp_path: Path) -> None:
    """Without the token of masks it is refused."""
    settings = replace(PLAIN, mask=7)
    assert read_eagle3(write(tmp_path, settings), target).mask_id == 7
    with pytest.raises(CheckpointError, match="mask_token_id"):
        read_eagle3(write(tmp_path, settings, ptd_token_id=None), target)


def test_flags_that_are_false_change_nothing(target: ModelConfig, tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, parallel_drafting=False, eagle_config={"use_aux_hidden_state": True})
    assert read_eagle3(folder, target).taps == (1, 2, 3)
