from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.kernels.launch import Launch
from aengine.kernels.linear.weights.e2m1 import Nvfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.linear.int4.test_product import nvfp4_scales

int4_launch = pytest.importorskip("aengine.kernels.linear.int4.launch")
int4_config = pytest.importorskip("aengine.kernels.linear.int4.config")
packed_codes = pytest.importorskip("aengine.kernels.linear.int4.packed_codes")
pytestmark = pytest.mark.gpu

OneRowConfig, StreamedRowConfig = int4_config.OneRowConfig, int4_config.StreamedRowConfig
CUTS = {
    "plain": OneRowConfig(block_n=16, warps=4, steps=1),
    "more-than-there-is": OneRowConfig(block_n=16, warps=4, steps=4),
    "low-and-long": OneRowConfig(block_n=16, warps=2, steps=2),
    "high": OneRowConfig(block_n=32, warps=2, steps=2),
}
STREAMS = {
    "one-warp": StreamedRowConfig(warps=1, ahead=1, registers=255),
    "all-ahead": StreamedRowConfig(warps=2, ahead=2, registers=128),
    "few-registers": StreamedRowConfig(warps=4, ahead=1, registers=64),
    "eight-warps": StreamedRowConfig(warps=8, ahead=1, registers=128),
}


def random_weight(n: int, k: int, group: int, device: torch.device) -> Int4Weight | Nvfp4Weight:
    """group: 16 for NVFP4."""
    if group == 16:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        return Nvfp4Weight.from_codes(codes, *nvfp4_scales(n, k, device=device))
    scale = (torch.rand(n, k // group, device=device) + 0.1).half()
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    return Int4Weight(codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [pytest.param(40, 384, 128, id="tiny"), pytest.param(9, 320, 320, id="tiny-uneven"), (4096, 4096, 256)],
)
def test_every_cut_gives_the_product_the_same_each_time(
    n: int, k: int, group: int, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    config = CUTS[cut]
    if config.warps * config.steps * 128 < k:
        pytest.skip("a longer row than the cut holds")
    check(config, n, k, group, dtype, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("cut", STREAMS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        (40, 512, 128),
        (9, 330, 330),
        (4096, 4096, 256),
        (6144, 4736, 128),
        (40, 512, 16),
        (9, 336, 16),
        (4096, 4096, 16),
        (6144, 4736, 16),
    ],
)
def test_every_cut_of_a_stream_gives_the_product_the_same_each_time(
    n: int, k: int, group: int, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("Gluon has no interpreter")
    check(STREAMS[cut], n, k, group, dtype, device)


def check(config: Any, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = random_weight(n, k, group, device)
    packed, product = packed_codes.pack_codes(weight), int4_launch.Int4Product()
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((1, k), (n,), (1, n)))
    expected = x.double() @ weight.dequantize().double().t() + bias.double()
    assert relative_error(product.row(x, packed, bias, None, config), expected) < tolerance(dtype)
    again = product.row(x, packed, bias, residual.clone(), config)
    total = expected + residual.double()
    out = product.row(x, packed, bias, residual, config)
    assert out is residual
    assert relative_error(out, total) < tolerance(dtype)
    assert torch.equal(out, again)


def test_one_row_has_a_kernel_if_its_programs_fill_the_processors() -> None:
    def config(n: int, k: int, group: int = 128, capability: tuple[int, int] = (9, 0)) -> object:
        words = torch.empty(n // 16, k // 128, 512, dtype=torch.int16, device="meta")
        scales = torch.empty(k // group, n, dtype=torch.int32, device="meta")
        weight = packed_codes.PackedCodes(words, scales, None, group, n, k, group == 16)
        return int4_config.one_row_config(weight, Launch(132, True, 227 * 1024, capability))

    assert config(4096, 4096) == OneRowConfig(16, 8, 4)
    assert config(6144, 4096) == StreamedRowConfig(4, ahead=4, registers=160)
    assert config(24576, 4096) == StreamedRowConfig(4, ahead=2, registers=80)
    assert config(4096, 12288) == StreamedRowConfig(8, ahead=5, registers=128)
    assert config(6144, 1024) == OneRowConfig(32, 8, 1)
    assert config(3584, 18944) == StreamedRowConfig(8, ahead=5, registers=128)
    assert config(8192, 28672) is None
    assert config(24576, 4096, capability=(7, 5)) is None
    assert config(24576, 128) is None
    assert config(4096, 65536) is None
    assert config(1024, 1024) is None
    assert config(4096, 4096, group=64) is None
    assert config(4096, 4096, group=16) == StreamedRowConfig(8, ahead=2, registers=128)
    assert config(24576, 4096, group=16) == StreamedRowConfig(4, ahead=2, registers=80)
    assert config(1024, 1024, group=16) is None


@pytest.mark.parametrize(
    ("k", "group"), [(384, 128), (256, 64), (256, 16)], ids=["tiny-long", "tiny-finely-grouped", "tiny-nvfp4"]
)
def test_unsupported_weights_are_refused(k: int, group: int, device: torch.device) -> None:
    packed = packed_codes.pack_codes(random_weight(16, k, group, device))
    with pytest.raises(ValueError, match=f"a row of {k} in groups of {group} is not for OneRowConfig"):
        int4_launch.Int4Product().row(torch.zeros(1, k, device=device), packed, None, None, OneRowConfig(16, 2, 1))


@pytest.mark.parametrize(("ahead", "dtype"), [(3, torch.float16), (1, torch.float32)], ids=["tiny-short", "tiny-wide"])
def test_a_stream_needs_the_blocks_it_loads_ahead_and_16_bits(
    ahead: int, dtype: torch.dtype, device: torch.device
) -> None:
    packed = packed_codes.pack_codes(random_weight(16, 512, 128, device))
    x, config = torch.zeros(1, 512, dtype=dtype, device=device), StreamedRowConfig(2, ahead, 128)
    with pytest.raises(ValueError, match="a row of 512 in groups of 128 is not for StreamedRowConfig"):
        int4_launch.Int4Product().row(x, packed, None, None, config)
