"""Towers are read with the other weights of a model, if they are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import ConfigError, WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import matching_checkpoint
from aengine.model.towers.build import count_weights
from tests.model.loading_one import load_model
from tests.model.towers.checkpoints import SEEING_CASES, picture, write_seeing
from tests.model.towers.seeing_harness import embed
from tests.model.towers.test_towers import load

_WEIGHTS = "model.safetensors"


def tokens(decoder: Decoder) -> Tensor:
    return embed(decoder, [picture(40, 30)]).tokens


def rename(folder: Path, old: str, new: str) -> None:
    tensors = {name.replace(old, new, 1): one for name, one in load_file(folder / _WEIGHTS).items()}
    save_file(tensors, folder / _WEIGHTS)


def test_text_alone_is_loaded_unless_the_tower_is_asked_for(tmp_path: Path) -> None:
    write_seeing("gemma3", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    decoder = Decoder(config, TorchKernels(), TorchAttention())
    assert decoder.tower is None
    assert not any("vision" in name for group in decoder.groups for name in group.entries)


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("gemma3", "vision_tower.", "vision_tower.vision_model."),
        ("gemma3", "vision_tower.", "model.vision_tower.vision_model."),
        ("gemma3", "multi_modal_projector.", "model.multi_modal_projector."),
        ("gemma4", "model.vision_tower.", "vision_tower."),
        ("qwen3-5", "model.visual.", "visual."),
    ],
)
def test_names_that_older_and_newer_files_have(case: str, old: str, new: str, tmp_path: Path) -> None:
    write_seeing(case, tmp_path)
    expected = tokens(load(tmp_path))
    rename(tmp_path, old, new)
    assert any(name.startswith(new) for name in load_file(tmp_path / _WEIGHTS))
    assert torch.equal(tokens(load(tmp_path)), expected)


def test_a_missing_tensor_of_the_tower_is_named(tmp_path: Path) -> None:
    write_seeing("qwen3-5", tmp_path)
    rename(tmp_path, "model.visual.merger.norm.bias", "model.visual.merger.norm.other")
    with pytest.raises(WeightsError, match=r"lack visual\.merger\.norm\.bias"):
        load(tmp_path)


def test_weights_without_a_tower_serve_text(tmp_path: Path) -> None:
    write_seeing("qwen3-5", tmp_path)
    text = {name: one for name, one in load_file(tmp_path / _WEIGHTS).items() if ".visual." not in name}
    save_file(text, tmp_path / _WEIGHTS)
    config = ModelConfig.from_folder(tmp_path)
    assert config.no_images == "the weights have no tensors of visual"
    with pytest.raises(ConfigError, match="the model takes none: the weights have no tensors of visual"):
        config.with_images()


def test_other_weights_are_refused_if_they_take_no_images(tmp_path: Path) -> None:
    write_seeing("qwen3-5", tmp_path)
    loaded = ModelConfig.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    without = ModelConfig.from_folder(tmp_path)
    matching_checkpoint(tmp_path, without, loaded)
    with pytest.raises(WeightsError, match="the loaded model takes images, this one none: "):
        matching_checkpoint(tmp_path, without, loaded.with_images())


def test_a_reload_reads_the_tower_again(tmp_path: Path) -> None:
    write_seeing("gemma4", tmp_path)
    decoder = load(tmp_path)
    before = tokens(decoder)
    changed = {
        name: one * 1.5 if "embed_vision" in name else one for name, one in load_file(tmp_path / _WEIGHTS).items()
    }
    save_file(changed, tmp_path / _WEIGHTS)
    checkpoint = matching_checkpoint(tmp_path, ModelConfig.from_folder(tmp_path), decoder.config)
    checkpoint.copy_into([decoder.groups], progress=False)
    torch.testing.assert_close(tokens(decoder), before * 1.5)


@pytest.mark.parametrize("case", ["qwen3-vl", "gemma3", "gemma4", "mistral3"])
def test_random_weights_give_finite_embeddings(case: str, tmp_path: Path) -> None:
    write_seeing(case, tmp_path)
    decoder = load_model(
        tmp_path,
        ModelConfig.from_folder(tmp_path).with_images(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        kernels=TorchKernels(),
        attention=TorchAttention(),
        load_format="dummy",
    )
    found = embed(decoder, [picture(40, 30)], torch.bfloat16).tokens
    assert found.isfinite().all()
    assert found.std() > 0


def test_a_configuration_with_images_survives_json(tmp_path: Path) -> None:
    """Processes that compile ahead get the configuration as JSON."""
    write_seeing("qwen3-vl", tmp_path)
    config = ModelConfig.from_folder(tmp_path).with_images()
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
    assert json.loads(msgspec.json.encode(config))["images"]["tower"]["type"] == "qwen"


@pytest.mark.parametrize("case", sorted(SEEING_CASES))
def test_the_number_of_weights_is_that_of_the_file(case: str, tmp_path: Path) -> None:
    write_seeing(case, tmp_path)
    spec = ModelConfig.from_folder(tmp_path).images
    assert spec is not None
    modules = tuple(f"{start}{module}." for module in spec.modules for start in ("", "model."))
    stored = {name: one for name, one in load_file(tmp_path / _WEIGHTS).items() if name.startswith(modules)}
    read = sum(one.numel() for name, one in stored.items() if not name.startswith(spec.unread or ("-",)))
    assert count_weights(spec) == read
