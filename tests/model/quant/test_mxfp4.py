"""MXFP4 experts as gpt-oss stores them, compared with an encoder of single numbers and with transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.model.dense import gate_first
from aengine.model.quant.formats.mxfp4 import Mxfp4

from .encoders import Encoded, mxfp4

PREFIX = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, ROWS, COLUMNS = 2, 6, 96


@pytest.fixture
def encoded() -> Encoded:
    return mxfp4(torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))


def places(encoded: Encoded) -> dict[str, torch.Tensor]:
    stored = Mxfp4().stored(PREFIX, ROWS, COLUMNS, experts=EXPERTS)
    for one in stored:
        assert (one.dtypes, one.shape) == (("U8",), encoded.tensors[one.name.removeprefix(PREFIX)].shape)
    return {one.key: encoded.tensors[one.name.removeprefix(PREFIX)] for one in stored}


def test_experts_come_back_as_what_their_numbers_mean(encoded: Encoded) -> None:
    weight = Mxfp4().unpack([PREFIX], ROWS, COLUMNS, places(encoded))
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=0, atol=0)


def test_transformers_reads_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (EXPERTS, ROWS, COLUMNS // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (EXPERTS, ROWS, COLUMNS // 32), dtype=torch.uint8, generator=generator)
    weight = Mxfp4().unpack([PREFIX], ROWS, COLUMNS, {"blocks": blocks, "scales": scales})
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, columns, rows]
    torch.testing.assert_close(weight.dequantize(), theirs.mT, rtol=0, atol=0)


def test_rows_by_turns_become_halves(encoded: Encoded) -> None:
    weight = Mxfp4().unpack([PREFIX], ROWS, COLUMNS, places(encoded))
    halves = weight.even_rows_first()
    meant = torch.stack([encoded.meant[:, 2 * i + half] for half in (0, 1) for i in range(ROWS // 2)], 1)
    torch.testing.assert_close(halves.dequantize(), meant, rtol=0, atol=0)
    bias = torch.arange(2 * ROWS).view(2, ROWS)
    assert gate_first(bias).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]


@pytest.mark.parametrize("bad", [253, 255])
def test_a_scale_that_overflows_is_named(encoded: Encoded, bad: int) -> None:
    encoded.tensors["_scales"][1, 2, 1] = bad
    with pytest.raises(WeightsError, match=f"{PREFIX}_scales holds {bad}, its values must be from 0 to 252"):
        Mxfp4().unpack([PREFIX], ROWS, COLUMNS, places(encoded))


def test_shapes_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="40 inputs are no multiple of 32"):
        Mxfp4().stored(PREFIX, ROWS, 40, experts=EXPERTS)
    with pytest.raises(UnsupportedModelError, match="experts fused in one tensor only"):
        Mxfp4().stored("model.layers.0.self_attn.q_proj", ROWS, COLUMNS)
