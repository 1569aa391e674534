"""An EAGLE-3 head is loaded from a folder of its own, and files that do not fit are refused before that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.staging import WeightsDigest
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.eagle3_config import read_eagle3
from aengine.model.loading.heads import load_heads
from aengine.model.loading.load import Placement, load_shards, matching_checkpoint
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.eagle3_drafts import Drafter, head_of, random_states
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import make_tensors, write_head

PLAIN = HeadSettings()
Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96)
    return folder


def load(folder: Path, target: Path, **options: Any) -> Decoder:
    """Load a target and its head. options: of `load_heads`."""
    placements = [Placement(torch.device("cpu"), TorchKernels(), TorchAttention())]
    config = ModelConfig.from_folder(target)
    config = config.with_head(read_eagle3(folder, config))
    decoders = load_shards(target, config, placements, dtype=torch.float32)
    load_heads(folder, decoders, placements, **options)
    return decoders[0]


def token_ids(folder: Path, target: Path) -> list[int] | None:
    ids = head_of(load(folder, target)).token_ids
    return None if ids is None else ids.tolist()


def rewrite(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def widen(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(64, 64)


def map_beyond(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] = 60


REFUSED: dict[str, tuple[Change, str]] = {
    "no norm": (lambda t: t.pop("midlayer.hidden_norm.weight"), "lack model.midlayer.hidden_norm.weight"),
    "no map": (lambda t: t.pop("d2t"), "lack model.d2t"),
    "no output matrix": (lambda t: t.pop("lm_head.weight"), "lack lm_head.weight"),
    "as wide as other layers": (widen, r"q_proj.weight has shape \[64, 64\], config.json makes it \[64, 128\]"),
    "fewer taps": (lambda t: t.update({"fc.weight": torch.zeros(64, 128)}), r"fc.weight has shape \[64, 128\]"),
    "a norm without its flag": (
        lambda t: t.update({"input_norm.weight": torch.ones(192)}), "hold input_norm.weight, which"
    ),
    "a map in floats": (lambda t: t.update(d2t=t["d2t"].float()), "d2t is F32; only I64, I32"),
    "a map beyond the vocabulary": (map_beyond, "model.d2t and its index holds 99"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit(case: str, target: Path, tmp_path: Path) -> None:
    change, error = REFUSED[case]
    write_head(PLAIN, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightsError, match=error):
        load(tmp_path, target)


def test_a_head_of_another_width_needs_its_own_embedding(target: Path, tmp_path: Path) -> None:
    settings = HeadSettings(hidden=48)
    write_head(settings, tmp_path)
    with pytest.raises(WeightsError, match=r"lack model.embed_tokens.weight"):
        load(tmp_path, target)


def test_a_pickle_is_refused(target: Path, tmp_path: Path) -> None:
    write_head(PLAIN, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model.bin is a pickle"):
        load(tmp_path, target)


def test_another_layout_is_named(target: Path, tmp_path: Path) -> None:
    write_head(PLAIN, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "head.gguf")
    with pytest.raises(UnsupportedModelError, match=r"head.gguf, llama.cpp's GGUF"):
        load(tmp_path, target)


def test_a_map_of_32_bits_is_the_same(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    write_head(PLAIN, tmp_path, tensors)
    rewrite(tmp_path, lambda t: t.update(d2t=t["d2t"].int()))
    assert token_ids(tmp_path, target) == (tensors["d2t"] + torch.arange(40)).tolist()


def test_a_map_over_every_token_is_read(target: Path, tmp_path: Path) -> None:
    """Some heads draft every token, in another order."""
    settings = HeadSettings(draft_vocab=96)
    write_head(settings, tmp_path)
    assert token_ids(tmp_path, target) is None
    rewrite(tmp_path, lambda t: t.update(d2t=95 - 2 * torch.arange(96)))
    assert token_ids(tmp_path, target) == list(range(95, -1, -1))


def test_random_weights_need_only_the_configuration(target: Path, tmp_path: Path) -> None:
    write_head(PLAIN, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = []
    for seed in (1, 1, 2):
        drafting = random_states(PLAIN, (3,))
        Drafter(load(tmp_path, target, load_format="dummy", seed=seed), drafting).draft(2)
        found.append(torch.stack(drafting[0].logits))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_digest_changes_with_the_weights(target: Path, tmp_path: Path) -> None:
    digests = []
    for seed in (0, 0, 1):
        write_head(PLAIN, tmp_path, make_tensors(PLAIN, seed))
        digest = WeightsDigest()
        load(tmp_path, target, digest=digest)
        digests.append(digest.result())
    assert digests[0] == digests[1] != digests[2]


def test_weights_in_several_files(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    write_head(PLAIN, tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert token_ids(tmp_path, target) == (tensors["d2t"] + torch.arange(40)).tolist()


def test_a_reload_of_the_target_keeps_the_head(target: Path, tmp_path: Path) -> None:
    """Another checkpoint of the target has no head, and yet the weights can be replaced."""
    decoder = load(write_head(PLAIN, tmp_path), target)
    checkpoint = matching_checkpoint(target, ModelConfig.from_folder(target), decoder.config)
    checkpoint.copy_into([decoder.groups], progress=False)
    assert decoder.draft_head is not None


def test_files_are_matched_without_asking_kernels_about_a_device_without_memory(target: Path, tmp_path: Path) -> None:
    class KernelsOfAGPU(TorchKernels):
        def gains_by_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
            if device.type == "meta":
                raise ValueError("no GPU")
            return dtype.itemsize == 2

    placements = [Placement(torch.device("cpu"), KernelsOfAGPU(), TorchAttention())]
    config = ModelConfig.from_folder(target)
    config = config.with_head(read_eagle3(write_head(PLAIN, tmp_path), config))
    decoders = load_shards(target, config, placements, dtype=torch.bfloat16)
    load_heads(tmp_path, decoders, placements)
    assert decoders[0].draft_head is not None


def test_a_decoder_that_was_built_without_a_head(target: Path, tmp_path: Path) -> None:
    placements = [Placement(torch.device("cpu"), TorchKernels(), TorchAttention())]
    decoders = load_shards(target, ModelConfig.from_folder(target), placements, dtype=torch.float32)
    with pytest.raises(ValueError, match="with_head"):
        load_heads(tmp_path, decoders, placements)
