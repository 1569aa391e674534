"""The default number of prompt tokens in a step, with and without running streams."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.model.config import ModelConfig
from aengine.runtime.startup.sizing.steps import default_mixed_tokens, default_step_tokens, device_speed, image_cost
from bench.shapes import add_tower, write_config

H200, A100, RTX_4090 = ((9, 0), 132), ((8, 0), 108), ((8, 9), 128)


@pytest.mark.parametrize(
    ("parameters", "gpu", "tokens"),
    [
        (600_000_000, H200, 16384),
        (4_020_000_000, H200, 16384),
        (8_190_000_000, H200, 8192),
        (4_020_000_000, A100, 8192),
    ],
)
def test_a_step_is_longer_where_nobody_waits_longer_for_it(
    parameters: int, gpu: tuple[tuple[int, int], int], tokens: int
) -> None:
    assert default_step_tokens(parameters, device_speed(*gpu)) == tokens


def test_streams_wait_about_as_long_on_every_device() -> None:
    """A step takes its tokens over the device's speed: an H200 reads 41,000 tokens of an 8B model a second."""
    fast, slow, slowest = (
        default_mixed_tokens(8_190_000_000, 8192, device_speed(*gpu)) for gpu in (H200, A100, RTX_4090)
    )
    assert (fast, slow, slowest) == (3072, 1152, 640)


@pytest.mark.parametrize(("parameters", "tokens"), [(600_000_000, 8192), (70_000_000_000, 256), (10**13, 128)])
def test_at_least_a_tile_and_at_most_a_step(parameters: int, tokens: int) -> None:
    assert default_mixed_tokens(parameters, 8192, device_speed(*H200)) == tokens


def test_what_the_tower_of_a_9b_costs(tmp_path: Path) -> None:
    """An image of a megapixel has 1,024 tokens. Its tower needs 6 TFLOP, and a token of the 9B 0.014."""
    write_config(tmp_path, "qwen3.5-9b")
    add_tower(tmp_path, "qwen3.5", 248056)
    model = ModelConfig.from_folder(tmp_path)
    assert image_cost(model) is None
    cost = image_cost(model.with_images())
    assert cost is not None
    assert cost.blocks == 27
    assert 1024 * cost.token == pytest.approx(240, rel=0.1)
    assert 1024**2 * cost.pair == pytest.approx(300, rel=0.1)
    two_ranks = image_cost(model.with_images().spread_over(2))
    assert two_ranks is not None
    assert two_ranks.token == 2 * cost.token
