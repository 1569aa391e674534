"""The benchmark of images runs through, on a small model on the CPU."""

from __future__ import annotations

import asyncio

import pytest

from bench.images import CASES, measure, parser
from bench.results import Report


# At least 2**16 pixels, and two tokens around them.
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tower", "tokens"), [("30m", "small", 66), ("gemma3-30m", "gemma3-small", 258)])
def test_every_case_has_its_figures(shape: str, tower: str, tokens: int) -> None:
    small = ["--device", "cpu", "--shape", shape, "--tower", tower, "--side", "64", "--context", "512"]
    small += ["--kv-cache-gib", "0.02", "--runs", "1", "--users", "2", "--rounds", "1", "--output", "3"]
    small += ["--streams", "1", "--stream-tokens", "40", "--settle", "0.1", "--tokens", "4"]
    report = Report("images")
    asyncio.run(measure(parser().parse_args(small), report))
    assert [str(one.case["case"]) for one in report.results] == ["first", "many", "many", "turns", "text", "text"]
    assert {str(one.case["case"]) for one in report.results} == set(CASES)
    figures = [value for one in report.results for value in one.figures.values() if value is not None]
    assert len(figures) in (15, 16)  # a stream of text may have no two fragments before the images come
    assert min(figures) > 0
    assert report.results[0].case["image_tokens"] == tokens
