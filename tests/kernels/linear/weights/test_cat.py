"""Rows of several weights in one, some rows of a weight, and rows added to it stand for the same numbers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import WeightsError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight, IntWeight
from tests.model.quant.schemes import slow_but_some
from tests.model.quant.test_formats import encode, format_of, load

NAMES = ["q_proj", "k_proj", "v_proj"]


@functools.cache  # encoders write one number at a time
def part(scheme: str, n: int, k: int, seed: int = 0) -> QuantizedWeight:
    return load(format_of(scheme), n, k, [encode(scheme, n, k, seed)], ["model.layers.0.mlp.up_proj"])


def unordered(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, order=None) if isinstance(weight, IntWeight) else weight


@pytest.mark.parametrize("scheme", slow_but_some())
@given(rows=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_parts_below_each_other(scheme: str, rows: list[int]) -> None:
    parts = [unordered(part(scheme, 8 * n, 64, seed)) for seed, n in enumerate(rows)]
    fused = parts[0].cat(parts[1:], NAMES[: len(rows)])
    assert torch.equal(fused.dequantize(), torch.cat([one.dequantize() for one in parts]))


@pytest.mark.parametrize(
    ("rows", "block_n"),
    [((256, 128, 128), 128), ((256, 130), 128), ((64, 64), 64), ((192, 64, 64), 64), ((96, 96), 32), ((3, 128), 1)],
)
def test_blocks_become_as_short_as_the_parts_need(rows: tuple[int, ...], block_n: int) -> None:
    parts = [part("fp8-blocks", n, 256, seed) for seed, n in enumerate(rows)]
    fused = parts[0].cat(parts[1:], NAMES[: len(rows)])
    assert isinstance(fused, Fp8Weight)
    assert fused.block == (block_n, 128)
    assert fused.scale.shape == (-(-sum(rows) // block_n), 2)
    assert torch.equal(fused.dequantize(), torch.cat([one.dequantize() for one in parts]))


def test_scales_of_whole_matrices_become_scales_of_rows_and_those_of_inputs_their_maximum() -> None:
    parts = [part("ct-fp8-tensor-static", n, 64, seed) for seed, n in enumerate((16, 8, 8))]
    fused = parts[0].cat(parts[1:], NAMES)
    assert isinstance(fused, Fp8Weight)
    assert (fused.block, fused.scale.shape, fused.activations) == ((1, 64), (32, 1), "static")
    scales = [float(one.input_scale) for one in parts if isinstance(one, Fp8Weight) and one.input_scale is not None]
    assert float(fused.input_scale) == max(scales)  # type: ignore[arg-type]
    assert len(set(scales)) == 3
    assert torch.equal(fused.dequantize(), torch.cat([one.dequantize() for one in parts]))


@pytest.mark.parametrize("scheme", slow_but_some())
def test_gate_and_up_of_several_experts(scheme: str) -> None:
    experts = [[encode(scheme, 24, 64, seed) for seed in (0, 1, 2)] for _ in range(2)]  # the same order of columns
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(3)]
    gate, up = (load(format_of(scheme, names[0]), 24, 64, encoded, names) for encoded in experts)
    fused = gate.cat([up], ["gate_proj", "up_proj"])
    assert fused.shape == (3, 48, 64)
    assert torch.equal(fused.dequantize(), torch.cat([gate.dequantize(), up.dequantize()], 1))
    if isinstance(fused, Fp8Weight) and fused.activations == "static":
        assert fused.input_scale is not None
        assert fused.input_scale.shape == (3,)


@pytest.mark.parametrize("scheme", slow_but_some())
@given(ranges=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 300)), min_size=1, max_size=3))
def test_some_rows(scheme: str, ranges: list[tuple[int, int]]) -> None:
    weight = part(scheme, 304, 64)
    bounds = [(first, min(first + count, 304)) for first, count in ranges]
    some = weight.rows(bounds)
    assert torch.equal(some.dequantize(), torch.cat([weight.dequantize()[slice(*one)] for one in bounds]))


@pytest.mark.parametrize("scheme", slow_but_some())
@pytest.mark.parametrize(("rows", "more"), [(16, 8), (160, 96), (256, 1)])
def test_rows_that_are_added_are_zero(scheme: str, rows: int, more: int) -> None:
    weight = part(scheme, rows, 64)
    padded = weight.pad(more).dequantize()
    assert torch.equal(padded[:rows], weight.dequantize())
    assert padded.shape == (rows + more, 64)
    assert not padded[rows:].any()


@pytest.mark.parametrize("kind", [Mxfp4Weight, Nvfp4Weight])
def test_every_operation_of_4_bit_floats(kind: type[E2m1Weight]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 8, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 120, (3, 8, 64 // kind.group), dtype=torch.uint8, generator=generator)
    weight = Mxfp4Weight.from_codes(codes, scale)
    if kind is Nvfp4Weight:
        weight = Nvfp4Weight.from_codes(
            codes, scale.view(torch.float8_e4m3fn), torch.rand(3, 8, 1, generator=generator)
        )
    exact = weight.dequantize()
    assert torch.equal(weight.cat([weight]).dequantize(), torch.cat([exact, exact], 1))
    assert torch.equal(weight.rows([(1, 3), (6, 8)]).dequantize(), exact[:, [1, 2, 6, 7]])
    assert torch.equal(weight.pad(2).dequantize(), torch.nn.functional.pad(exact, (0, 0, 0, 2)))
    assert torch.equal(weight.even_rows_first().dequantize(), exact[:, [0, 2, 4, 6, 1, 3, 5, 7]])


def test_int4_with_zeros_beside_int4_without() -> None:
    plain, zeros = part("ct-int4-channel", 8, 64), part("gptq-asymmetric", 16, 64)
    assert isinstance(plain, Int4Weight)
    assert isinstance(zeros, Int4Weight)
    assert plain.zero is None
    fused = plain.cat([zeros], NAMES[:2])
    assert torch.equal(fused.dequantize(), torch.cat([plain.dequantize(), zeros.dequantize()]))


def test_parts_that_order_their_columns_differently_are_refused_by_name() -> None:
    parts = [part("gptq-desc-act", 8, 64, seed) for seed in (0, 0, 1)]
    assert torch.equal(
        parts[0].cat(parts[1:2], NAMES[:2]).dequantize(), torch.cat([one.dequantize() for one in parts[:2]])
    )
    with pytest.raises(WeightsError, match="v_proj orders its columns differently than q_proj"):
        parts[0].cat(parts[1:], NAMES)
    with pytest.raises(WeightsError, match="k_proj orders its columns differently than q_proj"):
        part("gptq", 8, 64).cat(parts[:1], NAMES[:2])
