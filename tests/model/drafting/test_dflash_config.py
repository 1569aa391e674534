"""config.json of a DFlash head is read in two layouts, and a head that does not fit its target is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.cache.kv import KVLayer
from aengine.errors import CheckpointError, UnsupportedModelError, WeightsError
from aengine.model.config import ModelConfig
from aengine.model.drafting.dflash_config import read_dflash
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.dflash_reference import DFlashSettings
from tests.model.drafting.head_reference import make_tensors
from tests.model.drafting.head_reference import write_changed as write
from tests.model.ranks import Ranks

PLAIN = DFlashSettings()
SPECULATORS = DFlashSettings(speculators=True, draft_vocab=40, own_head=True)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(target_folder)


def test_the_plain_layout(target: ModelConfig, tmp_path: Path) -> None:
    spec = read_dflash(write(tmp_path, PLAIN), target)
    assert (spec.hidden_size, spec.rms_norm_eps, len(spec.layers)) == (64, 1e-5, 2)
    assert spec.taps == (1, 3, 4)  # files name the layers whose outputs are read
    assert (spec.block_size, spec.mask_id, spec.is_causal) == (6, 95, False)
    assert (spec.draft_vocab_size, spec.has_embedding, spec.has_head, spec.is_mapped) == (96, False, False, False)


def test_the_layout_of_speculators(target: ModelConfig, tmp_path: Path) -> None:
    spec = read_dflash(write(tmp_path, SPECULATORS), target)
    assert (spec.taps, spec.block_size, spec.mask_id) == ((1, 3, 4), 6, 95)
    assert (spec.draft_vocab_size, spec.has_embedding, spec.has_head, spec.is_mapped) == (40, False, True, True)


def test_the_block_size_may_be_in_the_section(target: ModelConfig, tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, block_size=None, dflash_config={"block_size": 9, "causal": True})
    spec = read_dflash(folder, target)
    assert (spec.block_size, spec.is_causal) == (9, True)


def test_settings_that_change_nothing(target: ModelConfig, tmp_path: Path) -> None:
    section = {"use_swa": False, "swa_window_size": 512, "attention_value_scale": 1.0, "attention_sink_bias": None}
    assert read_dflash(write(tmp_path, PLAIN, dflash_config=section), target).taps == (1, 3, 4)


@pytest.mark.parametrize("settings", [SPECULATORS, PLAIN], ids=["own-output", "output-of-the-target"])
def test_pages_and_weights_of_the_target_include_the_head(
    settings: DFlashSettings, target: ModelConfig, tmp_path: Path
) -> None:
    """Norms are not counted. Drafts read a copy in FP8 of the target's output matrix."""
    head = read_dflash(write(tmp_path, settings), target)
    model = target.with_head(head)
    assert head.parameters == sum(one.numel() for one in make_tensors(settings).values() if one.dim() == 2)
    copied = 0 if settings is SPECULATORS else target.vocab_size * target.hidden_size
    assert model.weight_bytes(torch.bfloat16) - target.weight_bytes(torch.bfloat16) == 2 * head.parameters + copied
    assert model.kv_shape(4, torch.bfloat16).layers == (KVLayer(4, 16),) * 4 + (KVLayer(2, 16),) * 2
    assert model.spread_over(2).draft_kv_layers == (KVLayer(1, 16),) * 2
    assert msgspec.json.decode(msgspec.json.encode(model), type=ModelConfig) == model


def _section(**changes: object) -> dict[str, object]:
    return {"dflash_config": changes}


NO_FIT: dict[str, tuple[DFlashSettings, dict[str, object], str]] = {
    "for another target": (PLAIN, {"target_hidden_size": 96}, "target_hidden_size is 96, that of the model 64; use a"),
    "for another vocabulary": (PLAIN, {"vocab_size": 1000}, "vocab_size is 1000, that of the model 96; use a head"),
    "drafting more than all tokens": (PLAIN, {"draft_vocab_size": 97}, "draft_vocab_size must be .* 1 to 96"),
    "a layer after the last": (PLAIN, _section(target_layer_ids=[1, 4]), r"target_layer_ids must .* 0 to 3 .*4"),
    "layers in another order": (PLAIN, _section(target_layer_ids=[2, 1]), "target_layer_ids must hold ascending"),
    "a layer twice": (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 1]}, "aux_hidden_state_layer_ids must hold asc"),
    "no layers": (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    "no mask": (SPECULATORS, {"mask_token_id": None}, "mask_token_id"),
    "a mask that is no token": (PLAIN, _section(mask_token_id=96), "mask_token_id must be .* 0 to 95, is 96"),
    "no block": (PLAIN, {"block_size": None}, "block_size"),
    "a block without drafts": (PLAIN, {"block_size": 1}, "block_size must be .* from 2"),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[DFlashSettings, dict[str, object], str]] = {
    "no architecture": (PLAIN, {"architectures": None}, "architectures is missing; supported are DFlashDraftModel and"),
    "DFlash2": (PLAIN, {"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel'.* is no DFlash head; supported"),
    "another kind of speculators": (
        SPECULATORS, {"speculators_model_type": "dspark"}, "speculators_model_type 'dspark' is no DFlash head"
    ),
    "a window": (PLAIN, _section(use_swa=True), "use_swa True is not supported in DFlash heads; use a head without it"),
    "sliding layers": (
        PLAIN,
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "layer_types: sliding windows of draft heads",
    ),
    "sinks": (PLAIN, _section(attention_sink_bias=True), "attention_sink_bias True is not supported"),
    "scaled values": (PLAIN, _section(attention_value_scale=0.5), "attention_value_scale 0.5 is not supported"),
    "latents": (PLAIN, _section(attention_mode="mla"), "attention_mode 'mla' is not supported"),
    "quantised": (PLAIN, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_FIT)
def test_a_head_that_does_not_fit_the_target(case: str, target: ModelConfig, tmp_path: Path) -> None:
    settings, changes, error = NO_FIT[case]
    with pytest.raises(CheckpointError, match=error):
        read_dflash(write(tmp_path, settings, **changes), target)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_head_of_another_kind(case: str, target: ModelConfig, tmp_path: Path) -> None:
    settings, changes, error = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=error):
        read_dflash(write(tmp_path, settings, **changes), target)


def test_files_that_do_not_fit(target_folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path, replace(PLAIN, layers=1)) / "model.safetensors"
    tensors = load_file(file)
    for change, error in (
        ({"fc.weight": torch.zeros(64, 64)}, r"fc.weight has shape \[64, 64\], config.json makes it \[64, 192\]"),
        ({"markov_head.markov_w1": torch.zeros(96, 8)}, "hold markov_head.markov_w1, which"),
        ({"hidden_norm.weight": None}, "lack model.hidden_norm.weight"),
    ):
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, file)
        with pytest.raises(WeightsError, match=error):
            Ranks(target_folder, 1, dflash=tmp_path)
