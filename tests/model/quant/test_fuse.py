"""Several matrices in one mean what they meant alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import WeightsError
from aengine.kernels.linear.weights import Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight, dequantize
from aengine.model.quant.fuse import fuse, stack

from .schemes import slow_but_some
from .test_formats import encode, format_of, load

NAMES = ["q_proj", "k_proj", "v_proj"]


def part(scheme: str, n: int, k: int, seed: int = 0) -> QuantizedWeight:
    return load(format_of(scheme), n, k, [encode(scheme, n, k, seed)], ["model.layers.0.mlp.up_proj"])


def unordered(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, order=None) if isinstance(weight, Int4Weight) else weight


@pytest.mark.parametrize("scheme", slow_but_some())
@given(rows=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_parts_below_each_other(scheme: str, rows: list[int]) -> None:
    parts = [unordered(part(scheme, 8 * n, 64, seed)) for seed, n in enumerate(rows)]
    fused = fuse(parts, NAMES[: len(rows)])
    assert torch.equal(dequantize(fused), torch.cat([dequantize(one) for one in parts]))


@pytest.mark.parametrize(
    ("rows", "block_n"),
    [((256, 128, 128), 128), ((256, 130), 128), ((64, 64), 64), ((192, 64, 64), 64), ((96, 96), 32), ((3, 128), 1)],
)
def test_blocks_become_as_short_as_the_parts_need(rows: tuple[int, ...], block_n: int) -> None:
    parts = [part("fp8-blocks", n, 256, seed) for seed, n in enumerate(rows)]
    fused = fuse(parts, NAMES[: len(rows)])
    assert isinstance(fused, Fp8Weight)
    assert fused.block == (block_n, 128)
    assert fused.scale.shape == (-(-sum(rows) // block_n), 2)
    assert torch.equal(dequantize(fused), torch.cat([dequantize(one) for one in parts]))


def test_scales_of_whole_matrices_become_scales_of_rows_and_those_of_inputs_their_maximum() -> None:
    parts = [part("ct-fp8-tensor-static", n, 64, seed) for seed, n in enumerate((16, 8, 8))]
    fused = fuse(parts, NAMES)
    assert isinstance(fused, Fp8Weight)
    assert (fused.block, fused.scale.shape, fused.activations) == ((1, 64), (32, 1), "static")
    scales = [float(one.input_scale) for one in parts if isinstance(one, Fp8Weight) and one.input_scale is not None]
    assert float(fused.input_scale) == max(scales)  # type: ignore[arg-type]
    assert len(set(scales)) == 3
    assert torch.equal(dequantize(fused), torch.cat([dequantize(one) for one in parts]))


@pytest.mark.parametrize("scheme", slow_but_some())
def test_experts_side_by_side_and_their_parts_below_each_other(scheme: str) -> None:
    gates = [part(scheme, 24, 64, seed) for seed in range(3)]
    ups = gates  # the same order of columns
    names = ["0", "1", "2"]
    stacked = fuse([stack(gates, names), stack(ups, names)], ["gate_proj", "up_proj"])
    alone = [torch.cat([dequantize(gate), dequantize(up)]) for gate, up in zip(gates, ups)]
    assert torch.equal(dequantize(stacked), torch.stack(alone))
    if isinstance(stacked, Fp8Weight) and stacked.activations == "static":
        assert stacked.input_scale is not None
        assert stacked.input_scale.shape == (3,)


def test_int4_with_zeros_beside_int4_without() -> None:
    plain, zeros = part("ct-int4-channel", 8, 64), part("gptq-asymmetric", 16, 64)
    assert isinstance(plain, Int4Weight)
    assert plain.zero is None
    fused = fuse([plain, zeros], NAMES[:2])
    assert torch.equal(dequantize(fused), torch.cat([dequantize(plain), dequantize(zeros)]))


def test_an_expert_with_an_order_beside_one_without() -> None:
    experts = [part("gptq", 8, 64), part("gptq-desc-act", 8, 64)]
    stacked = stack(experts, NAMES[:2])
    assert torch.equal(dequantize(stacked), torch.stack([dequantize(one) for one in experts]))


def test_parts_that_order_their_columns_differently_are_refused_by_name() -> None:
    parts = [part("gptq-desc-act", 8, 64, seed) for seed in (0, 0, 1)]
    assert torch.equal(dequantize(fuse(parts[:2], NAMES[:2])), torch.cat([dequantize(one) for one in parts[:2]]))
    with pytest.raises(WeightsError, match="v_proj orders its columns otherwise than q_proj"):
        fuse(parts, NAMES)
    with pytest.raises(WeightsError, match="k_proj orders its columns otherwise than q_proj"):
        fuse([part("gptq", 8, 64), parts[0]], NAMES[:2])


def test_formats_do_not_mix() -> None:
    mxfp4 = Mxfp4Weight.of(torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.uint8))
    with pytest.raises(WeightsError, match="q_proj, k_proj are quantised differently"):
        fuse([part("gptq", 8, 64), mxfp4], NAMES[:2])
    assert torch.equal(dequantize(fuse([mxfp4, mxfp4], NAMES[:2])), torch.zeros(16, 64))
