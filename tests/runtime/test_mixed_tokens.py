"""How many prompt tokens go beside running streams by default."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.runtime.start_cuda import default_mixed_tokens, device_speed

H200, A100, RTX_4090 = ((9, 0), 132), ((8, 0), 108), ((8, 9), 128)


def test_streams_wait_about_as_long_on_every_device() -> None:
    """A step takes its tokens over the device's speed: an H200 reads 41,000 tokens of an 8B model a second."""
    fast, slow, slowest = (
        default_mixed_tokens(8_190_000_000, 8192, device_speed(*gpu)) for gpu in (H200, A100, RTX_4090)
    )
    assert (fast, slow, slowest) == (3072, 1152, 640)


@pytest.mark.parametrize(("parameters", "tokens"), [(600_000_000, 8192), (70_000_000_000, 256), (10**13, 128)])
def test_at_least_a_tile_and_at_most_a_step(parameters: int, tokens: int) -> None:
    assert default_mixed_tokens(parameters, 8192, device_speed(*H200)) == tokens
