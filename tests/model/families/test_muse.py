"""Muse Glimmer: the text model alone, settings that its case in `CASES` does not vary, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)

import aengine
from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import DEMO
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load


@pytest.mark.parametrize(
    "text",
    [
        pytest.param({"layer_rope_theta": [1e4, 0, 1e4, 0, 1e4]}, id="rotations apart from windows"),
        pytest.param(
            {"layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]}, id="windows"
        ),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"post_norm_eps": 0.5, "qk_scale_factor": 0.3}, id="factors"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}, id="linear"),
    ],
)
def test_logits_equal_those_of_transformers(text: dict[str, object], tmp_path: Path) -> None:
    model = write_checkpoint("muse-glimmer", tmp_path, **text)
    assert_mixed(load(tmp_path, ()), [model])


def test_a_language_model_alone_has_the_same_logits(tmp_path: Path) -> None:
    """transformers has no class of the language model with its output matrix, so its name is ours."""
    model = write_checkpoint("muse-glimmer", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    alone = values["text_config"] | {"architectures": ["MuseGlimmerTextForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("model.language_model.", "model."): one for name, one in load_file(path).items()}
    save_file({name: one for name, one in tensors.items() if "vision" not in name}, path)
    assert_mixed(load(tmp_path, ()), [model])


@pytest.mark.anyio
async def test_the_text_model_that_transformers_saves_alone_gives_its_embeddings(tmp_path: Path) -> None:
    text = write_checkpoint("muse-glimmer", tmp_path / "whole", vocab_size=4096).model.language_model
    assert isinstance(text, MuseGlimmerTextModel)
    folder = tmp_path / "alone"
    text.save_pretrained(folder)
    shutil.copy(DEMO / "tokenizer.json", folder)
    prompts = [torch.randint(0, 4096, (length,)).tolist() for length in (3, 17, 40)]
    async with aengine.Engine(str(folder), device="cpu", progress=False, num_pages=100) as engine:
        found = await engine.embed(prompts)
    for vector, prompt in zip(found.vectors, prompts, strict=True):
        with torch.inference_mode():
            last = text(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0)
        torch.testing.assert_close(torch.tensor(vector), expected, atol=1e-4, rtol=0)


def test_a_file_without_settings_has_those_of_the_config_class(tmp_path: Path) -> None:
    config = MuseGlimmerConfig()
    config.architectures = ["MuseGlimmerForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    written = ModelConfig.from_folder(tmp_path)
    with_config(tmp_path, text_config={"model_type": "muse_glimmer_text"})
    assert ModelConfig.from_folder(tmp_path) == written
    assert [layer.attention.window for layer in written.layers[-5:]] == [None, 2048, 2048, 2048, None]
    assert (written.eos_token_ids, written.bos_token_id) == ((200_001,), 200_000)
    with torch.device("meta"):
        model = MuseGlimmerForConditionalGeneration(config)
    expected = sum(one.numel() for one in (*model.model.language_model.parameters(), *model.lm_head.parameters()))
    assert written.parameters == expected


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"layer_rope_theta": [0, 1e4, 5e5, 1e4, 0]}, UnsupportedModelError, "layer_rope_theta"),
        ({"layer_rope_theta": [0, 1e4]}, CheckpointError, "layer_rope_theta"),
        ({"sliding_window": None}, CheckpointError, "sliding_window"),
        ({"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    text: dict[str, object], error: type[Exception], named: str, tmp_path: Path
) -> None:
    settings = MuseGlimmerTextConfig(num_hidden_layers=5).to_dict() | text
    values = {"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(error, match=named):
        ModelConfig.from_folder(tmp_path)
