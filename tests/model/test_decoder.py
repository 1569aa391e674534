"""Properties of the decoder. `test_equality` compares its results with transformers."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer
from aengine.attention.torch_backend import TorchAttention
from aengine.cache.kv import KVPool
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.blocks.attention import Attention
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import leave_empty
from tests.model.loading_one import load_model

from .checkpoints import VOCAB, write_checkpoint
from .harness import Harness

META = torch.device("meta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


def load(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Decoder:
    return load_model(
        folder, config, device=torch.device("cpu"), dtype=dtype, kernels=TorchKernels(), attention=TorchAttention()
    )


class ShapeAttention:
    """A backend that returns tensors of the right shapes and reads no value."""

    name = "shape"

    def __init__(self) -> None:
        self.windows: list[int | None] = []  # of the layers that were called

    def bind(self, layer: AttentionLayer) -> Attend:
        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
            self.windows.append(layer.window)
            return torch.empty_like(q, memory_format=torch.contiguous_format)

        return attend


def decodes_of_shapes(ids: Tensor) -> AttentionBatch:
    """Return a batch of one decode for each of `ids`, on tensors without contents."""
    rows = len(ids)
    return AttentionBatch(
        slots=ids,
        page_table=torch.empty(rows, 2, dtype=torch.int32, device=META),
        seq_lens=torch.empty(rows, dtype=torch.int32, device=META),
        query_starts=torch.empty(rows + 1, dtype=torch.int32, device=META),
        num_decodes=rows,
        query_lens=[1] * rows,
        context_lens=[1] * rows,
    )


def shapes_alone(decoder: Decoder, wanted: int | None = None, rehearsal: bool = False) -> Tensor:
    """Run a step of 5 tokens on tensors without contents. Reading a value, or a shape that depends on one, raises."""
    kv = KVPool(decoder.config.kv_shape(16, torch.bfloat16), 4, META)
    ids = torch.empty(5, dtype=torch.int64, device=META)
    with torch.inference_mode():
        return decoder.forward(
            ids, ids, decodes_of_shapes(ids), kv, None if wanted is None else ids[:wanted], rehearsal
        )


def test_a_step_never_looks_at_values(config: ModelConfig) -> None:
    decoder = Decoder(config, TorchKernels(), ShapeAttention(), torch.bfloat16, META)
    leave_empty(decoder.groups)
    hidden = shapes_alone(decoder)
    with torch.inference_mode():
        logits = decoder.logits(hidden[:2])
    assert hidden.shape == (5, config.hidden_size)
    assert (logits.shape, logits.dtype) == ((2, VOCAB), decoder.dtype)


def test_a_rehearsal_takes_one_layer_of_each_kind_and_the_last(config: ModelConfig) -> None:
    plain = config.layers[0]
    sliding = replace(plain, attention=replace(plain.attention, window=8))
    many = replace(config, layers=(plain, sliding, sliding, plain, plain, sliding))
    attention = ShapeAttention()
    decoder = Decoder(many, TorchKernels(), attention, torch.bfloat16, META)
    leave_empty(decoder.groups)
    hidden = shapes_alone(decoder, wanted=2, rehearsal=True)
    assert attention.windows == [None, 8, 8]
    assert hidden.shape == (2, config.hidden_size)  # so the last layer was among them
    with decoder.rehearsals():
        shapes_alone(decoder, wanted=2)
    assert attention.windows == [None, 8, 8] * 2
    shapes_alone(decoder, wanted=2)
    assert len(attention.windows) == 6 + len(many.layers)


def test_a_rehearsal_takes_a_layer_of_each_format(config: ModelConfig) -> None:
    quantized = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 128],
        "modules_to_not_convert": ["model.layers.0", "model.layers.3", "lm_head"],
    }
    said = msgspec.json.encode({"quantization_config": quantized}).decode()
    many = replace(config, layers=config.layers[:1] * 4, quantization=said)
    attention = ShapeAttention()
    decoder = Decoder(many, TorchKernels(), attention, torch.bfloat16, META)
    leave_empty(decoder.groups)
    shapes_alone(decoder, rehearsal=True)
    assert len(attention.windows) == 3  # a layer of floats, a layer of FP8, and the last one


def test_bfloat16_stays_near_float32(folder: Path, config: ModelConfig) -> None:
    prompts = [list(range(1, 30)), [7, 3, 7]]
    full, half = (
        Harness(load(folder, config, dtype), page_size=16).generate(prompts, 1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for exact, rounded in zip(full, half):
        torch.testing.assert_close(rounded.logits[0].float(), exact.logits[0], atol=0.3, rtol=0)


def test_the_rotary_table_can_be_shorter_than_the_model_allows(config: ModelConfig) -> None:
    decoder = Decoder(config, TorchKernels(), TorchAttention(), device=META, max_positions=16)
    [(attention, _), *_] = decoder._layers
    assert isinstance(attention, Attention)
    assert attention._cos_sin.shape == (16, config.layers[0].attention.head_dim)


@pytest.mark.parametrize("case", ["qwen3", "qwen3-bias-untied", "qwen2-moe", "qwen3-5", "deepseek-v3", "gpt-oss"])
def test_the_weights_go_with_the_decoder(case: str, tmp_path: Path) -> None:
    """At once, without the garbage collector."""
    write_checkpoint(case, tmp_path)
    decoder = load(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32)
    weights = [weakref.ref(weight) for group in decoder.groups for weight in group.open(()).values()]
    weights += [weakref.ref(value) for value in vars(decoder).values() if isinstance(value, Tensor)]
    gc.disable()
    try:
        assert weights[0]() is not None
        del decoder
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()
