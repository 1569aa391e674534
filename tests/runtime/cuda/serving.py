"""Requests that a test sends through a runtime without a GPU."""

from __future__ import annotations

import itertools
import random
from typing import Any

from aengine.cache.radix import packed
from aengine.model.config import ModelConfig
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.step.results import read_outcome
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from tests.runtime.ways import WAYS


def serve(runtime: Runtime, rows: int) -> int:
    """Requests of every kind, alone and many at a time; how many steps they took."""
    scheduler = Scheduler(
        num_pages=runtime.pool.num_pages,
        page_size=16,
        max_rows=rows,
        max_step_tokens=runtime.max_step_tokens,
        max_queue=1000,
        mixed_limit=runtime.mixed_limit,
        most_drafts=runtime.speculation.most_drafts,
    )
    executor: Any = runtime.runner
    executor = executor._executor
    rng = random.Random(8)
    shared = [rng.randrange(1000) for _ in range(2048)]
    tickets = itertools.count()
    steps = 0
    for ways in [*([way] for way in WAYS), *(rng.choices(WAYS, k=together) for together in (2, 7, max(60, rows)))]:
        for way in ways:
            length = rng.choice([1, 9, 100, 700, 3000])
            prompt = shared[: rng.choice([0, 64, 2048])] + [rng.randrange(1000) for _ in range(length)]
            images = images_after(len(prompt), runtime, rng)
            prompt += [] if images is None else [0] * (images.end - len(prompt)) + [1, 2]
            params, rank = SamplingParams(**way), (0.0, next(tickets))
            end = len(prompt) + rng.randint(2, 40)
            leader = Sequence(
                prompt=packed(prompt),
                params=params,
                seed=0,
                stop_ids=(7,),
                max_total=end,
                rank=rank,
                siblings=rng.choice([0, 0, 0, 2]),
                images=images,
                prompt_keys=None if images is None else packed(prompt),
            )
            scheduler.add(leader)
        while (plan := scheduler.schedule()) is not None:
            for new in plan.new_rows if runtime.adapters is not None and len(ways) != 2 else ():
                new.adapter = new.tokens[-1] % (runtime.adapters.count + 1)
            scheduler.commit(plan, read_outcome(executor.execute(plan), lambda row: None, plan))
            steps += 1
    return steps


def images_after(tokens: int, runtime: Runtime, rng: random.Random) -> PromptImages | None:
    """Return up to two images after the tokens of a prompt. None: there are none, or the model takes none."""
    tower, images = runtime.model.tower, list[PlacedImage]()
    for _ in range(0 if tower is None else rng.choice([0, 1, 1, 2])):
        images.append(empty_image(runtime.model, *rng.choices([20, 200, 500, 1000], k=2), tokens, rng))
        tokens = images[-1].end + 1
    splittable = tower is None or tower.splittable
    return PromptImages(tuple(images), -1 if splittable else 0, splittable) if images else None


def empty_image(model: ModelConfig, width: int, height: int, start: int, rng: random.Random) -> PlacedImage:
    """Return a black image of a size, with a random key."""
    assert model.tower is not None
    plan = model.tower.plan(width, height)
    size = {"width": plan.width, "height": plan.height, "rows": plan.rows, "columns": plan.columns}
    pixels = bytes(3 * plan.width * plan.height)
    return PlacedImage(digest=b"", pixels=pixels, start=start, key=rng.randrange(2**31, 2**32), **size)
