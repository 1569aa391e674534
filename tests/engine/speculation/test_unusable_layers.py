"""MTP layers that cannot be used: by itself an engine starts without them, and on request it says what to write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aengine
from aengine.errors import ConfigError, WeightsError
from tests.engine.speculation.test_heads import KNOBS, VOCAB, answers, with_tokenizer
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

Tensors = dict[str, Tensor]


def lacks_a_tensor(tensors: Tensors) -> None:
    del tensors["mtp.layers.0.mlp.down_proj.weight"]


def has_another_shape(tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = torch.zeros(64, 100)


def has_another_format(tensors: Tensors) -> None:
    name = "mtp.layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.zeros_like(tensors[name], dtype=torch.int32)


def has_tensors_of_another_kind(tensors: Tensors) -> None:
    tensors["mtp.layers.0.self_attn.o_proj.weight_scale"] = torch.ones(1)


DEFECTS = {
    lacks_a_tensor: "lack mtp.layers.0.mlp.down_proj.weight",
    has_another_shape: "mtp.fc.weight",
    has_another_format: "mtp.layers.0.self_attn.o_proj.weight",
    has_tensors_of_another_kind: "mtp.layers.0.self_attn.o_proj.weight_scale",
}


def damaged(folder: Path, damage: Callable[[Tensors], None]) -> Path:
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return with_tokenizer(folder)


@pytest.mark.parametrize("damage", DEFECTS, ids=lambda damage: damage.__name__)
async def test_an_automatic_choice_never_fails_a_start(
    tmp_path: Path, damage: Callable[[Tensors], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = damaged(tmp_path / "target", damage)
    with caplog.at_level(logging.INFO, logger="aengine"):
        ids, _, proposer = await answers(folder, "auto")
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("speculation:")]
    assert line.startswith("speculation: off (the MTP layer cannot be used: ")
    assert DEFECTS[damage] in line
    assert "\n" not in line
    assert (proposer, ids) == ("off", (await answers(folder, "off"))[0])
    with pytest.raises(ConfigError, match=r"^speculation: mtp cannot be used: .*; write off, or ngram") as error:
        await answers(folder, "mtp")
    assert DEFECTS[damage] in str(error.value)


@pytest.mark.slow
async def test_neither_do_ranks_that_the_layer_cannot_be_divided_among(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    with_tokenizer(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"mtp_intermediate_size": 40', '"mtp_intermediate_size": 41'))
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"mtp.layers.0.mlp.{name}.weight"] = torch.zeros(41, 64)
    tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 41)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert (await answers(folder, "auto"))[2] == "mtp"
    assert (await answers(folder, "auto", tensor_parallel_size=2))[2] == "off"
    with pytest.raises(ConfigError, match=r"speculation: mtp cannot be used: tensor_parallel_size: .*write off"):
        await answers(folder, "mtp", tensor_parallel_size=2)


async def test_a_damaged_model_is_refused_for_itself(tmp_path: Path) -> None:
    """Nothing is said about its MTP layer."""

    def both(tensors: Tensors) -> None:
        lacks_a_tensor(tensors)
        del tensors["model.norm.weight"]

    folder = damaged(tmp_path / "target", both)
    for kind in ("auto", "mtp"):
        with pytest.raises(WeightsError, match=r"lack .*model\.norm\.weight"):
            async with aengine.Engine(str(folder), speculation=kind, **KNOBS):
                pass
