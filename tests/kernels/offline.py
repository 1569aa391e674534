"""Triton's own compiler, which needs no GPU, with every launch left to a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aengine.kernels import norms, rope, row_steps, triton_kernels
from aengine.kernels.attention import (
    chunk_attention,
    decode_attention,
    latent_decode,
    latent_inputs,
    output_gate,
    prefix_attention,
)
from aengine.kernels.collective import peers
from aengine.kernels.delta import across, convolve, triton_delta, within
from aengine.kernels.delta import decode as delta_decode
from aengine.kernels.draw import cutoff, gumbel
from aengine.kernels.experts import (
    few_rows,
    many_rows,
    shared_gate,
    single_rows,
    triton_experts,
    weighted_sum,
)
from aengine.kernels.experts.fp8 import experts as fp8_experts
from aengine.kernels.experts.fp8 import many_rows as fp8_many_experts
from aengine.kernels.experts.packed import experts as packed_experts
from aengine.kernels.experts.packed import rows as packed_rows
from aengine.kernels.experts.packed import single_rows as packed_single_rows
from aengine.kernels.experts.routing import plan, route, route_rows
from aengine.kernels.launch import Launch
from aengine.kernels.linear import gated_rows, one_row, small_linear, triton_linear
from aengine.kernels.linear.fp8 import few_rows as fp8_few_rows
from aengine.kernels.linear.fp8 import few_tiles as fp8_few_tiles
from aengine.kernels.linear.fp8 import inputs as fp8_inputs
from aengine.kernels.linear.fp8 import library as fp8_library
from aengine.kernels.linear.fp8 import linear as fp8_linear
from aengine.kernels.linear.fp8 import many_rows as fp8_many_rows
from aengine.kernels.linear.fp8 import pieces as fp8_pieces
from aengine.kernels.linear.int4 import launch as int4_launch
from aengine.kernels.linear.int4 import linear as int4_linear
from aengine.kernels.lora import (
    expand,
    expand_gated,
    pairs,
    pairs_gated,
    pairs_sum,
    shrink,
    shrink_few,
    shrink_row,
    triton_adapted,
)
from aengine.kernels.offline import OfflineDriver

KERNELS = (  # those that ask the device
    *(
        chunk_attention,
        cutoff,
        decode_attention,
        gated_rows,
        gumbel,
        latent_decode,
        latent_inputs,
        norms,
        one_row,
        output_gate,
        peers,
        prefix_attention,
        rope,
        row_steps,
        small_linear,
    ),
    *(
        fp8_few_rows,
        fp8_few_tiles,
        fp8_inputs,
        fp8_library,
        fp8_linear,
        fp8_many_rows,
        fp8_pieces,
        int4_launch,
        int4_linear,
        triton_kernels,
        triton_linear,
    ),
    *(few_rows, fp8_experts, fp8_many_experts, many_rows, packed_experts, packed_rows, packed_single_rows),
    *(plan, route, route_rows, shared_gate, single_rows, triton_experts, weighted_sum),
    *(expand, expand_gated, pairs, pairs_gated, pairs_sum, shrink, shrink_few, shrink_row, triton_adapted),
    *(across, convolve, delta_decode, triton_delta, within),
)
MARKS = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(
        not isinstance(norms._rms_norm_kernel.jit, JITFunction), reason="the interpreter compiles nothing"
    ),
]


def take_over(
    monkeypatch: pytest.MonkeyPatch, offline: OfflineDriver, launch: Launch, run: Callable[..., None]
) -> None:
    """From now on kernels see a device as `launch` says, and `run(kernel, *args, **options)` is every launch."""
    for module in KERNELS:
        monkeypatch.setattr(module, "launch_for", lambda device: launch)
    monkeypatch.setattr(driver, "_active", offline)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: run(kernel, *args, **options))
