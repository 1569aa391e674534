"""Kernels compile for several GPUs and fit their shared memory. Triton's compiler needs no GPU.

Each shape is compiled for an H200, and every second one also for one of the other GPUs in turn. Each test has at least
one shape for each GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels import elementwise
from aengine.kernels.attention import (
    gather_pages,
    inputs,
)
from aengine.kernels.attention.heads import Heads
from aengine.kernels.collective.kernels import arrived_kernel
from aengine.kernels.collective.mailboxes import LANES, PROGRAMS, Mailbox
from aengine.kernels.collective.overlapped import sum_two_parts
from aengine.kernels.collective.peers import PeerCollective
from aengine.kernels.decodes import triton_decodes
from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.draw import cutoff, gumbel, likeliest, penalties
from aengine.kernels.elementwise import gate_output
from aengine.kernels.linear import small_linear
from aengine.kernels.linear.fp8.config import few_rows_config, few_tiles_config, many_rows_config, pieces_of_k
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.few_rows import Fp8FewRows
from aengine.kernels.linear.fp8.few_tiles import few_tiles
from aengine.kernels.linear.fp8.linear import Fp8Linear
from aengine.kernels.linear.int4 import launch as int4_launch
from aengine.kernels.linear.int4.config import StreamedRowConfig, int4_config, one_row_config
from aengine.kernels.linear.int4.packed_codes import PackedCodes
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.ngram import triton_ngram
from aengine.kernels.parts import Parts
from aengine.kernels.recurrent.state import DraftedBatch, DraftUpdates, RecurrentHeads, RecurrentState, StateBatch
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.gpus import (
    HAVE_FP8,
    META,
    Compiler,
    eighth,
    every_gpu,
    half,
    ints,
    longs,
    maker,
    octets,
    single,
)
from tests.kernels.offline import MARKS

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.turns("compiler", always=("H200",), every=2, each=True)]

compiler = every_gpu


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 4096, 4096),
        (1, 5120, 2048),
        (1, 151936, 1024),
        (16, 6144, 4096),
        (32, 1024, 3072),
        (64, 4096, 12288),
        (64, 6144, 4096),
    ],
)
def test_products_of_few_rows(compiler: Compiler, m: int, n: int, k: int) -> None:
    config = small_linear.linear_config(m, n, k, 2, compiler.gpu.launch)
    assert config is not None
    small_linear.SmallLinear()(half(m, k), half(n, k))
    assert compiler.shared[-1] <= config.shared_memory(m, 2)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_products_that_are_activated_in_the_end(compiler: Compiler, tokens: int) -> None:
    x, kernels = half(tokens, 4096), TritonKernels()
    codes = Int4Weight(octets(24576, 4096), half(24576, 32))
    for linear in (kernels.dense(half(24576, 4096), None), kernels.quantized(codes, None, torch.bfloat16)):
        before = len(compiler.shared)
        out = linear.apply_activated(x, elementwise.TritonNorm(half(4096), 1e-6))
        assert (None if out is None else out.shape) == ((tokens, 12288) if compiler.gpu.capability == 90 else None)
        assert len(compiler.shared) > before or out is None
    elementwise.silu_mul(half(1, 8))  # so that something is compiled for other GPUs


@pytest.mark.parametrize("k", [2048, 3840, 4096])
def test_products_of_a_row_normed_by_float32(compiler: Compiler, k: int) -> None:
    small_linear.SmallLinear()(half(1, k), half(12352, k), norm=elementwise.TritonNorm(single(k), 1e-6))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_delta_nets(compiler: Compiler, kept: torch.dtype) -> None:
    heads = RecurrentHeads(16, 32, 128, 128)
    count, values = heads.channels, heads.value_heads
    weights = DeltaWeights(heads, half(count, 4), half(values), half(values), half(heads.value_dim), 1e-6)
    recurrence = maker(kept)(9, values, heads.key_dim, heads.value_dim)
    batch = StateBatch(ints(12), ints(12), ints(5), longs(300), ints(300), num_decodes=8)
    x = half(300, count + heads.values + 2 * values).split((count, heads.values, values, values), dim=1)
    TritonKernels().delta_net(weights)(*x, RecurrentState(half(9, 4, count), recurrence), batch)


def test_delta_nets_with_drafts(compiler: Compiler) -> None:
    heads = RecurrentHeads(16, 32, 128, 128)
    count, values, entries = heads.channels, heads.value_heads, 7
    weights = DeltaWeights(heads, half(count, 4), half(values), half(values), half(heads.value_dim), 1e-6)
    drafts = DraftUpdates(
        half(9, entries, count),
        single(9, entries, 16, 128),
        single(9, entries, values, 128),
        single(9, entries, values),
    )
    state = RecurrentState(half(9, 4, count), single(9, values, heads.key_dim, heads.value_dim), drafts)
    batch = StateBatch(
        ints(12), ints(12), ints(5), longs(300), ints(300), 8, DraftedBatch(longs(12), longs(12), ints(12))
    )
    x = half(300, count + heads.values + 2 * values).split((count, heads.values, values, values), dim=1)
    TritonKernels().delta_net(weights)(*x, state, batch)
    # The chunk without drafts runs first. One kernel then decodes all rows with drafts.
    assert compiler.names[-1] == "_drafts_kernel"
    assert compiler.names.count("_drafts_kernel") == 1
    assert "_decode_kernel" not in compiler.names


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 128, 128, 64), (1, 24, 256, 64), (8, 64, 128, 64)])
def test_mamba(compiler: Compiler, kept: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    heads = RecurrentHeads(*sizes)
    conv, each = half(heads.channels, 4), [single(heads.value_heads) for _ in range(3)]
    mamba = TritonKernels().mamba(MambaWeights(heads, conv, half(heads.channels), *each))
    parts = (heads.values, heads.channels, heads.value_heads)
    z, xbc, dt = half(300, sum(parts)).split(parts, dim=1)
    drafts = DraftUpdates(
        half(9, 7, heads.channels),
        single(9, 7, heads.key_heads, heads.key_dim),
        single(9, 7, heads.value_heads, heads.value_dim),
        single(9, 7, heads.value_heads),
    )
    recurrence = maker(kept)(9, heads.value_heads, heads.key_dim, heads.value_dim)
    state = RecurrentState(half(9, 4, heads.channels), recurrence, drafts)
    for drafted in (None, DraftedBatch(longs(12), longs(12), ints(12))):
        batch = StateBatch(ints(12), ints(12), ints(5), longs(300), ints(300), 8, drafted)
        assert mamba(xbc, z, dt, state, batch).shape == (300, heads.values)
        assert compiler.names[-2:] == ["_chunks_kernel", "_decode_kernel"]


@HAVE_FP8
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 6144, 4096), (16, 4096, 4096), (64, 4096, 12288), (128, 4096, 4096), (8192, 24576, 4096)]
)
def test_products_with_fp8_weights(compiler: Compiler, m: int, n: int, k: int) -> None:
    weight = Fp8Weight(eighth(n, k), single(n // 128, k // 128), (128, 128), "group")
    linear = Fp8Linear(weight, None, Fp8FewRows(), BlockProducts())
    launch = compiler.gpu.launch
    few = few_rows_config(m, n, k, 2, launch)
    tiles = few_tiles_config(m, n, k, launch) if launch.capability[0] == 9 else None
    linear.apply(half(m, k), residual=half(m, n))
    config = tiles or many_rows_config(m, n, launch)
    assert compiler.shared[-1] <= (config.shared_memory() if tiles or not few else few.shared_memory(m, 2))


@pytest.mark.parametrize("compiler", ["H200"], indirect=True)
@pytest.mark.parametrize(("m", "count"), [(128, 3), (256, 2)])
def test_products_in_pieces(compiler: Compiler, m: int, count: int) -> None:
    weight = Fp8Weight(eighth(4096, 12288), single(32, 96), (128, 128), "group")
    linear = Fp8Linear(weight, None, Fp8FewRows(), BlockProducts())
    assert linear.apply(half(m, 12288), residual=half(m, 4096)).shape == (m, 4096)
    assert pieces_of_k(m, 4096, 12288, compiler.gpu.launch) == count
    assert compiler.names[-1] == "_add_up_kernel"


@pytest.mark.parametrize("compiler", ["H200"], indirect=True)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 4096, 12288), (256, 4096, 4096)])
def test_products_of_few_tiles(compiler: Compiler, m: int, n: int, k: int) -> None:
    config = few_tiles_config(m, n, k, compiler.gpu.launch)
    assert config is not None
    few_tiles(eighth(m, k), single(k // 128, m), eighth(n, k), single(n // 128, k // 128), config, Parts())
    assert compiler.shared[-1] <= config.shared_memory()


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "e2m1"),
    [
        (8, 4096, 4096, 128, False),
        (16, 4096, 12288, 32, False),
        (64, 4096, 4096, 32, True),
        (128, 4096, 12288, 32, True),
        (8, 4096, 4096, 16, True),
        (8, 24576, 4096, 16, True),
        (256, 4096, 4096, 16, True),
        (256, 6144, 4096, 128, False),
        (512, 24576, 4096, 64, False),
    ],
)
def test_products_with_4_bit_weights(compiler: Compiler, m: int, n: int, k: int, group: int, e2m1: bool) -> None:
    words = torch.empty(n // 16, k // 128, 512, dtype=torch.int16, device=META)
    groups = k // (group if not e2m1 else 128) if group != 16 else 2 * (k // 128) + 1
    weight = PackedCodes(words, ints(groups, n), None, group, n, k, e2m1)
    product = int4_launch.Int4Product()
    product(half(m, k), weight)
    config = int4_config(m, n, k // 128, 2, compiler.gpu.launch, nvfp4=weight.nvfp4)
    assert compiler.shared[-1] <= config.shared_memory(2)
    product.dequantised(weight, torch.bfloat16)


@pytest.mark.parametrize("new", [half, lambda *shape: torch.empty(*shape, dtype=torch.float16, device=META)])
@pytest.mark.parametrize("nvfp4", [False, True], ids=["int4", "nvfp4"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4100, 9600)])
def test_products_of_one_row_with_4_bit_weights(
    compiler: Compiler, n: int, k: int, nvfp4: bool, new: Callable[..., Tensor]
) -> None:
    blocks = k // 128
    words = torch.empty(-(-n // 16), blocks, 512, dtype=torch.int16, device=META)
    scales = ints(2 * blocks + 1 if nvfp4 else blocks, n)
    weight = PackedCodes(words, scales, None, 16 if nvfp4 else 128, n, k, nvfp4)
    config = one_row_config(weight, compiler.gpu.launch)
    assert config is not None
    int4_launch.Int4Product()(new(1, k), weight)
    if isinstance(config, StreamedRowConfig):
        assert compiler.shared[-1] <= config.shared_memory(blocks)


def test_the_gates_of_heads(compiler: Compiler) -> None:
    gate_output(half(4, 4096), half(4, 9216).unflatten(1, (-1, 256))[:, 1:32:2])


def test_the_sampler(compiler: Compiler) -> None:
    logits, numbers = half(8, 151936), (single(8), ints(8), ints(8), longs(8))
    gumbel.Draw(8, META)(logits, *numbers, longs(8))
    gumbel.Draw(8, META)(logits, *numbers, longs(8), floor=single(8))
    cutoff.Cutoff(8, META)(logits, single(8), ints(8), single(8), single(8))
    for vocab in (151936, 600_000):
        likeliest.likeliest(half(8, vocab), longs(5), longs(8), 20)
    penalties.penalize_seen(single(8, 151936), longs(5), longs(8), ints(9, 151936), *single(8, 3).unbind(1))


@pytest.mark.parametrize("capacity", [4096, 40961])
def test_ngram_drafts(compiler: Compiler, capacity: int) -> None:
    history, lengths, rows = ints(9, capacity), longs(9), longs(5)
    triton_ngram.match(history, lengths, rows, 8, 2, 5)
    triton_ngram.append(history, lengths, rows, longs(5, 6), longs(5))


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("new", [half, single])
def test_sums_and_gathers_of_ranks(compiler: Compiler, count: int, new: Callable[..., Tensor]) -> None:
    lanes = ints(2, count, PROGRAMS, LANES // count // PROGRAMS, 4)
    collective = PeerCollective(1, Mailbox(lanes, longs(count), ints(PROGRAMS), longs(2)))
    norm = elementwise.TritonNorm(new(4096), 1e-6)
    for rows in (1, 64, 8192):
        collective.sum(new(rows, 4096))
        collective.sum_and_norm(new(rows, 4096), new(rows, 4096), norm)
        collective.gather(new(rows, 18992), count * 18992)
    arrived_kernel[(1,)](
        longs(count), ints(PROGRAMS), longs(2), 1, count, PROGRAMS, LANES // count // PROGRAMS, 32, num_warps=1
    )
    sum_two_parts(new(3, 5120), new(3, 5120), new(3, 5120), elementwise.TritonNorm(new(5120), 1e-6), new(3, 5120))


def test_everything_small(compiler: Compiler) -> None:
    elementwise.rms_norm(half(3, 16384), half(16384), 1e-6)
    elementwise.silu_mul(half(3, 24576))
    elementwise.xielu(half(3, 21504), single(4))
    elementwise.rotate(half(3, 48, 72)[:, :32], single(3, 1, 36), single(3, 1, 36))
    elementwise.gated_silu_mul(half(3, 1024), half(3, 2048), half(1, 2048))
    caches = [half(100, 16, 8, 128), eighth(100, 16, 8, 128)]
    for cache in caches if compiler.gpu.capability >= 89 else caches[:1]:
        inputs.qk_norm_rope_store(
            half(7, 48 * 128), Heads(32, half(128), half(128), 1e-6), single(4096, 128), longs(7), (cache, cache),
            longs(7),
        )  # fmt: skip
        inputs.qk_norm_rope_store(
            half(70, 40 * 512), Heads(32, half(512), half(512), 1e-6, v_norm=True, kv="keys"), single(4096, 512),
            longs(70), (half(100, 16, 8, 512), half(100, 16, 8, 512)), longs(70),
        )  # fmt: skip
        inputs.qk_norm_rope_store(
            half(7, 36 * 128), Heads(32, interleaved=True), single(4096, 64), longs(7),
            (half(100, 16, 2, 128), half(100, 16, 2, 128)), longs(7),
        )  # fmt: skip
        gather_pages.gather_pages(
            cache,
            cache,
            ints(2, 50),
            ints(2),
            gather_pages.GatherPlan(ints(2), ints(3), ints(3), ints(2)),
            half(64, 8, 128),
            half(64, 8, 128),
        )
    rows, one = (longs(8), longs(8)), longs(1)
    for windows in (None, ints(64, 100)):
        triton_decodes.begin(*rows, 1, longs(1, 64), longs(64), ints(64, 100), 16, 63, one, 4, windows)
    finite = torch.empty(8, dtype=torch.bool, device=META)
    triton_decodes.end(*rows, longs(8), finite, longs(1, 64), longs(64), longs(4, 8, 2), one, 63)
