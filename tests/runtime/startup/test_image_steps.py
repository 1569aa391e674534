"""The steps with images that a start-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.image_steps import image_steps, with_largest_images
from aengine.runtime.startup.start import start_runtime
from aengine.runtime.startup.warm_up import largest_steps
from bench.shapes import add_tower, write_config

pytestmark = pytest.mark.anyio
CONFIG = EngineConfig(
    device="cpu", max_num_seqs=4, max_step_tokens=200, max_model_len=300, num_pages=40, load_format="dummy"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path, "30m")
    add_tower(tmp_path, "small", 4000, deepstack_visual_indexes=[2])
    return tmp_path


def test_a_model_without_a_tower_has_none(folder: Path) -> None:
    model = ModelConfig.from_folder(folder)
    assert image_steps(CONFIG, model, 200, 300) == []
    steps = largest_steps(CONFIG, 200, 300)
    assert with_largest_images(CONFIG, model, steps) == steps


def test_every_token_of_the_largest_step_is_one_of_an_image(folder: Path) -> None:
    model = ModelConfig.from_folder(folder).with_images()
    for step in with_largest_images(CONFIG, model, largest_steps(CONFIG, 200, 300)):
        [work] = step.encodings
        assert work.blocks == 2  # the first one, and the one after which tokens are merged
        for chunk in step.prefill:
            assert chunk.images is not None
            [image] = chunk.images.images
            assert image.key != work.image.key  # one is kept while the other is computed
            assert image.rows * image.columns >= 299
            assert image.start == chunk.start
            assert image.end >= chunk.start + len(chunk.token_ids)


async def test_they_run(folder: Path) -> None:
    runtime = start_runtime(CONFIG, folder, ModelConfig.from_folder(folder))
    try:
        runner: Any = runtime.runner
        encoder = runner._executor._images
        runner._executor.rehearse_images(True)
        steps = image_steps(CONFIG, runtime.model, 200, 300)
        assert [step.num_tokens for step in steps] == [64, 200]  # an image of 256 tokens is cut
        steps += with_largest_images(CONFIG, runtime.model, largest_steps(CONFIG, 200, 300)[:1])
        for number, step in enumerate(steps, 1):
            for new in step.new_rows:
                new.pages = [0] * len(new.pages)
            await runtime.runner.launch(step).result()
            assert encoder.computed == number
        assert encoder._begun is not None
        runner._executor.rehearse_images(False)
        assert encoder._begun is None
    finally:
        runtime.close()
