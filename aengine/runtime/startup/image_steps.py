"""Steps with images that start-up runs. They write into page 0, which belongs to no sequence, or into pages of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.runtime.startup.warm_up import PLAIN, one_prompt
from aengine.runtime.step.image_memory import largest_image
from aengine.step_plan import ImageWork, StepPlan

# Tokens of images. Libraries choose kernels by the number of rows.
SIZES = (1, 16, 64, 256, 1024, 4096)


def image_steps(config: EngineConfig, model: ModelConfig, max_step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """Return steps with images of several sizes. The list is empty if the model takes no images."""
    if (largest := largest_image(config, model)) is None or model.tower is None:
        return []
    most = min(max_step_tokens, max_model_len)
    steps = []
    for key, plan in enumerate(_plans(model.tower, largest)):
        step = one_prompt(config, min(plan.tokens, most), PLAIN)
        steps.append(_seeing(step, _image(plan, key)))
    return steps


def with_largest_images(config: EngineConfig, model: ModelConfig, steps: Sequence[StepPlan]) -> list[StepPlan]:
    """Return the steps, with an image in all prompts if the model takes images.

    The image is the largest one. Before it, another one is computed in part. So no step needs more memory.
    """
    if (largest := largest_image(config, model)) is None or model.tower is None:
        return list(steps)
    image, blocks = _image(largest, -1), model.tower.tower.rehearsed
    return [
        replace(_seeing(step, image), encodings=[ImageWork(_image(largest, -key), blocks)])
        for key, step in enumerate(steps, 2)
    ]


def _seeing(step: StepPlan, image: PlacedImage) -> StepPlan:
    """Return the step with an image at the begin of each prompt."""
    images = PromptImages((image,))
    return replace(step, prefill=[replace(chunk, images=images) for chunk in step.prefill])


def _plans(spec: ImageSpec, largest: ImagePlan) -> list[ImagePlan]:
    """Return sizes of images, in the order of their tokens."""
    plans = {}
    for tokens in SIZES:
        side = max(1, math.isqrt(tokens)) * spec.patch * spec.merge
        plan = spec.plan(side, side)
        if plan.tokens <= largest.tokens:
            plans[plan.tokens] = plan
    return [plans[tokens] for tokens in sorted(plans)] or [largest]


def _image(plan: ImagePlan, key: int) -> PlacedImage:
    return PlacedImage(
        digest=b"", width=plan.width, height=plan.height, pixels=bytes(3 * plan.width * plan.height), start=0,
        rows=plan.rows, columns=plan.columns, key=key,
    )  # fmt: skip
