"""Which config is chosen for which number of tokens. Needs no device."""

from __future__ import annotations

import bisect

import pytest

pytest.importorskip("triton")

from aengine.kernels.experts.config import (
    experts_borders,
    fp8_single_config,
    fp8_tile_config,
    mxfp4_few_config,
    packed_single_config,
    packed_tile_config,
    single_config,
    tile_config,
)
from aengine.kernels.experts.routing.plan import AT_ONCE
from aengine.kernels.experts.routing.route import route_config
from aengine.kernels.experts.routing.route_rows import MAX_TOKENS
from aengine.kernels.launch import Launch

H200 = Launch(132, True, 227 * 1024, capability=(9, 0))


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 4096, 16384])
@pytest.mark.parametrize("shared_memory", [99, 163, 227])
def test_every_choice_fits_into_shared_memory(tokens: int, shared_memory: int) -> None:
    launch = Launch(132, True, shared_memory * 1024, capability=(9, 0))
    for config, weight_bytes in (
        (tile_config(tokens, 8, 128, 2, launch), 2),
        (fp8_tile_config(tokens, 8, 128, 2, launch), 1),
    ):
        assert config.shared_memory(2, weight_bytes) <= shared_memory * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(128, 8), (8, 2), (64, 6), (512, 10)],
)
@pytest.mark.parametrize("processors", [132, 108])
def test_cuts_change_at_borders_only(experts: int, top_k: int, processors: int) -> None:
    launch = Launch(processors, processors == 132, 227 * 1024, capability=(9, 0))
    borders, before = experts_borders(top_k, experts, 2048, launch, 17000), None
    for tokens in range(1, 17000):
        block = bisect.bisect_left(AT_ONCE, tokens * top_k)
        cuts = (
            block,
            *(choose(tokens, top_k, 2048, 2) for choose in (single_config, fp8_single_config)),
            packed_single_config(tokens, 2),
            mxfp4_few_config(tokens, top_k, experts, launch),
            *(
                choose(tokens, top_k, experts, 2, launch)
                for choose in (tile_config, fp8_tile_config, packed_tile_config)
            ),
            *(route_config(tokens, experts, 2048, wide, launch) for wide in (False, True)),
            tokens <= MAX_TOKENS,
        )
        assert (tokens - 1 in borders) == (before not in (None, cuts))
        before = cuts


@pytest.mark.parametrize(
    ("experts", "hidden", "splits", "block"),
    [
        pytest.param(128, 2048, 4, 512, id="30B-A3B"),
        pytest.param(256, 2048, 8, 256, id="35B-A3B"),
        pytest.param(32, 2880, 6, 512, id="gpt-oss, in pieces of 480"),
        pytest.param(256, 7168, 28, 256, id="DeepSeek-V3"),
        pytest.param(384, 7168, 16, 32, id="Kimi K2, too much for 32 programs to have at once"),
        pytest.param(4, 4104, 9, 512, id="in pieces of 456"),
        pytest.param(4, 4100, 1, 32, id="in no pieces"),
    ],
)
def test_the_columns_of_a_router_for_few_tokens_are_split(experts: int, hidden: int, splits: int, block: int) -> None:
    for tokens in (1, 64, 512):
        config = route_config(tokens, experts, hidden, False, H200)
        assert (config.splits, config.block_k) == (splits, block)
    assert route_config(513, experts, hidden, False, H200).splits == 1
