"""Keys and values in FP8. The reference is transformers with a cache that is rounded in plain torch."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.kv_scales import FP8, KVScales
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from tests.model.loading_one import load_model

from .checkpoints import VOCAB, write_checkpoint
from .harness import Harness
from .ranks import Ranks

NEW_TOKENS = 24
LAYER = "model.layers.{}.self_attn"
SCALES = [(0.02, 0.005), (0.03, 0.5)]  # (keys, values) of each layer


class RoundedCache(DynamicCache):
    """A cache that rounds its contents to FP8 numbers times a scale."""

    def __init__(self, scales: list[tuple[float, float]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        keys, values = (
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((keys, values), self.scales[layer_idx], strict=True)
        )
        return super().update(keys, values, layer_idx, *rest, **more)


@torch.inference_mode()
def continued(model: PreTrainedModel, prompt: list[int], cache: DynamicCache) -> tuple[list[int], Tensor]:
    """Return greedy ids, and the logits of each draw, [NEW_TOKENS, vocab]."""
    ids, logits, fed = [], [], torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        # A positional argument, because newer versions call it something else.
        logits.append(model(fed, None, None, cache, use_cache=True).logits[0, -1])
        fed = logits[-1].argmax().view(1, 1)
        ids.append(int(fed))
    return ids, torch.stack(logits)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 17, 32, 49)]


def load(folder: Path, kv_dtype: torch.dtype | None = FP8) -> Decoder:
    return load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
        kv_dtype=kv_dtype,
    )


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to the checkpoint in a folder."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


def spelled(keys: str, values: str, shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {
        f"{LAYER.format(layer)}.{name}": torch.full(shape, scale)
        for layer, scales in enumerate(SCALES)
        for name, scale in zip((keys, values), scales, strict=True)
    }


@pytest.mark.parametrize("case", ["qwen3", "qwen2-window-upper-layer"])
@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ids_and_logits_are_those_of_a_rounded_cache(case: str, scaled: bool, tmp_path: Path) -> None:
    model = write_checkpoint(case, tmp_path)
    if scaled:
        add(tmp_path, spelled("k_scale", "v_scale"))
    scales = SCALES if scaled else [(1.0, 1.0)] * 2
    expected = [continued(model, prompt, RoundedCache(scales)) for prompt in prompts()]
    exact = [continued(model, prompt, DynamicCache()) for prompt in prompts()]
    rounding = [float((a - b).abs().median()) for (_, a), (_, b) in zip(expected, exact, strict=True)]
    assert min(rounding) > 0.03  # rounding has a visible effect
    decoder = load(tmp_path)
    for chunk in (None, 7):
        sequences = Harness(decoder, page_size=5).generate(prompts(), NEW_TOKENS, chunk=chunk)
        assert [sequence.tokens for sequence in sequences] == [
            prompt + ids for prompt, (ids, _) in zip(prompts(), expected, strict=True)
        ]
        # The last bit of a product may decide between two codes. Then all later results differ a little: in few
        # sequences, and by far less than rounding to FP8.
        differences = [
            (torch.stack(sequence.logits) - logits).abs()
            for sequence, (_, logits) in zip(sequences, expected, strict=True)
        ]
        medians = [float(difference.median()) for difference in differences]
        assert statistics.median(medians) < 1e-4
        assert all(median < seen / 30 for median, seen in zip(medians, rounding, strict=True))
        assert max(float(difference.max()) for difference in differences) < 0.1


# ---- scales of checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def scales_of(decoder: Decoder) -> list[KVScales]:
    return [attention._scales for attention, _ in decoder._layers]


def test_every_rank_has_the_scales(folder: Path) -> None:
    add(folder, spelled("k_scale", "v_scale"))
    ranks = Ranks(folder, 2, kv_dtype=FP8)
    assert [scales_of(decoder) for decoder in ranks.decoders] == [scales_of(load(folder))] * 2
    [alone] = Ranks(folder, 1, kv_dtype=FP8).generate(prompts(), 1)
    for sequences in ranks.generate(prompts(), 1):
        for one, other in zip(sequences, alone, strict=True):
            difference = (one.logits[0] - other.logits[0]).abs()
            assert float(difference.median()) < 1e-2  # the last bit may decide between two codes


@pytest.mark.parametrize(
    ("keys", "values", "shape"),
    [("k_scale", "v_scale", ()), ("k_scale", "v_scale", (1,)), ("k_proj.k_scale", "v_proj.v_scale", ())],
)
def test_every_spelling_of_a_scale_is_read(keys: str, values: str, shape: tuple[int, ...], folder: Path) -> None:
    add(folder, spelled(keys, values, shape))
    for scales, (key, value) in zip(scales_of(load(folder)), SCALES, strict=True):
        assert (scales.key, scales.value) == pytest.approx((key, value))


def test_one_scale_for_both(folder: Path) -> None:
    add(folder, {f"{LAYER.format(1)}.kv_scale": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert scales_of(load(folder)) == [KVScales(), KVScales(0.5, 0.5)]


def test_scales_mean_nothing_to_a_cache_of_values(folder: Path) -> None:
    add(folder, spelled("k_scale", "v_scale"))
    assert scales_of(load(folder, None)) == [KVScales(), KVScales()]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -0.5])
def test_a_scale_that_is_none_is_named(scale: float, folder: Path) -> None:
    add(folder, spelled("k_scale", "v_scale") | {f"{LAYER.format(1)}.v_scale": torch.tensor(scale)})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.self_attn\.v_scale holds"):
        load(folder)


def test_a_scale_for_each_head_is_refused_by_its_shape(folder: Path) -> None:
    add(folder, {f"{LAYER.format(0)}.k_scale": torch.ones(2, 1, 1)})
    with pytest.raises(WeightsError, match=r"self_attn\.k_scale has shape \[2, 1, 1\]"):
        load(folder)


# ---- latents -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_latents_are_read_as_they_were_rounded(scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has one scale, because a latent is key and value. The result equals that over rounded floats."""
    write_checkpoint("deepseek-v3", tmp_path)
    add(tmp_path, {f"{LAYER.format(layer)}.k_scale": torch.tensor(scale) for layer in range(3)})

    def logits(kv_dtype: torch.dtype | None) -> list[Tensor]:
        sequences = Harness(load(tmp_path, kv_dtype), page_size=5).generate(prompts(), 6, chunk=7)
        return [torch.stack(sequence.logits) for sequence in sequences]

    exact, found, write = logits(None), logits(FP8), TorchKernels.latent_inputs

    def rounding(self: TorchKernels, *inputs: Any) -> None:
        *rest, cache, slots, out, _ = inputs
        write(self, *rest, cache, slots, out, 1.0)
        kept = cache.view(-1, cache.shape[-1])
        kept[slots] = (kept[slots] / scale).clamp(-448, 448).to(FP8).float() * scale

    monkeypatch.setattr(TorchKernels, "latent_inputs", rounding)
    for ours, expected, plain in zip(found, logits(None), exact, strict=True):
        assert (expected - plain).abs().median() > 0.01  # rounding has a visible effect
        assert (ours - expected).abs().median() < 1e-4
