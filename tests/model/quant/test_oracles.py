"""Bytes that other packages wrote. transformers is run here; words of other writers are kept in this file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.model.quant.base import LinearFormat
from aengine.model.quant.formats.awq import Awq, AwqGemv
from aengine.model.quant.formats.fp8 import Fp8
from aengine.model.quant.formats.gptq import Gptq
from aengine.model.quant.formats.pack_quantized import PackQuantized

from .encoders import Encoded
from .test_formats import load

PREFIX = "model.layers.0.mlp.up_proj"
N, K, GROUP = 8, 16, 8

_ROW, _COLUMN = torch.arange(N)[:, None], torch.arange(K)[None, :]
CODES = (_ROW * 5 + _COLUMN * 3 + _COLUMN // 8) % 16  # [n, k]
ZEROS = (_ROW * 3 + torch.arange(K // GROUP)[None, :] * 7 + 1) % 15 + 1  # [n, groups], 1 to 15
SCALES = 0.5 + torch.arange(N * K // GROUP).view(N, -1) / 8  # [n, groups]
GPTQ_CODES = [
    [1392285232, -1488852091, -57265958, 1105954095, -1775183244, -343593015, 819622942, -2060465821],
    [-343593015, 819622942, -2060465821, -629924168, 801727245, 1948170322, -916255321, 515396348],
]
AWQ_CODES = [
    972416160, 1814566867, -1621407226, -1030849223, -172908436, 686085023, 1528235714, -1907738123,
    -1030849223, -172908436, 686085023, 1528235714, -1907738123, -1317180376, -459235493, 399753870,
]  # fmt: skip


def gptq_file(zeros: list[list[int]]) -> dict[str, Tensor]:
    return {"qweight": words(GPTQ_CODES), "qzeros": words(zeros), "scales": SCALES.T.contiguous()}


def words(values: list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("linear", "tensors"),
    [
        # compressed-tensors 0.20.0, pack_to_int32
        pytest.param(
            PackQuantized(GROUP, symmetric=False),
            {
                "weight_packed": words(torch.tensor(GPTQ_CODES).T.tolist()),
                "weight_zero_point": words([[-2060535726, -57262135]]),
                "weight_scale": SCALES,
                "weight_shape": torch.tensor([N, K]),
            },
            id="pack-quantized",
        ),
        # gptqmodel 7.7.0, pack_cols and its conversion to v1
        pytest.param(Gptq(GROUP, 2), gptq_file([[-2060535726], [-57262135]]), id="gptq_v2"),
        pytest.param(Gptq(GROUP, 1), gptq_file([[1948100417], [-343593288]]), id="gptq"),
        # autoawq 0.2.9, WQLinear_GEMM.from_linear
        pytest.param(
            Awq(GROUP),
            {
                "qweight": words([[word] for word in AWQ_CODES]),
                "qzeros": words([[-2102043006], [-113457415]]),
                "scales": SCALES.T.contiguous(),
            },
            id="awq",
        ),
    ],
)
def test_words_that_the_writers_packages_packed(linear: LinearFormat, tensors: dict[str, Tensor]) -> None:
    weight = load(linear, N, K, [Encoded(tensors, SCALES)], [PREFIX])
    assert isinstance(weight, Int4Weight)
    assert weight.zero is not None
    assert torch.equal(weight.codes.long(), CODES)
    assert torch.equal(weight.zero.long(), ZEROS)
    meant = (CODES - ZEROS.repeat_interleave(GROUP, 1)) * SCALES.repeat_interleave(GROUP, 1)
    assert torch.equal(weight.dequantize(), meant)


def test_words_that_autoawq_packed_in_the_gemv_layout() -> None:
    """autoawq 0.2.9, the first two rows of WQLinear_GEMV.from_linear."""
    row, column, group = torch.arange(2)[:, None], torch.arange(64)[None, :], torch.arange(2)[None, :]
    codes, zeros = (row * 5 + column * 3 + column // 8) % 16, (row * 3 + group * 7 + 1) % 15 + 1
    scales = torch.arange(16.0).view(2, 8)  # padded from 2 groups to 32 below
    tensors = {
        "qweight": words(
            [
                [1392285232, -343593015, 1948170322, 229065195, -1775183244, 801727245, -1202520938, 1105954095],
                [-1488852091, 819622942, -916255321, 1392285232, -343593015, 1948170322, 229065195, -1775183244],
            ]
        ),
        "qzeros": words([[146, 0, 0, 0], [197, 0, 0, 0]]),
        "scales": F.pad(scales, (0, 24)),
    }
    weight = load(AwqGemv(32), 2, 64, [Encoded(tensors, codes.float())], [PREFIX])
    meant = (codes - zeros.repeat_interleave(32, 1)) * scales[:, :2].repeat_interleave(32, 1)
    assert torch.equal(weight.dequantize(), meant)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (128, 128), (512, 128)])
def test_transformers_reads_blocks_of_fp8_the_same(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(n // 128, k // 128, generator=generator)
    weight = Fp8((128, 128), "group", "weight_scale_inv").unpack([PREFIX], n, k, {"weight": codes, "scale": scale})
    assert isinstance(weight, Fp8Weight)
    read = Fp8Dequantize(None).convert({"weight": codes, "weight_scale_inv": scale})["weight"]
    torch.testing.assert_close(weight.dequantize(), read, rtol=0, atol=0)
