"""A tower's work counts like tokens: steps divide it, so that streams do not wait long for an image."""

from __future__ import annotations

import random

import pytest

from aengine.cache.radix import packed
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import ImageCost, ImageWork, MixedLimit, StepPlan, StepResult

BLOCKS = 10
COST = ImageCost(token=2.0, pair=0.1, blocks=BLOCKS)
LIMIT = MixedLimit(tokens=256, context=10_000, multiple=16)


def test_attention_grows_with_the_square_of_the_tokens() -> None:
    def cost(rows: int) -> float:
        return COST.of_block(image(0, rows, 10)) * BLOCKS

    assert cost(1) == pytest.approx(10 * 2 + 10 * 10 * 0.1)
    assert cost(2) == pytest.approx(20 * 2 + 20 * 20 * 0.1)


def image(start: int, rows: int, columns: int, key: int = 7) -> PlacedImage:
    return PlacedImage(digest=b"", width=0, height=0, pixels=b"", start=start, rows=rows, columns=columns, key=key)


class Engine:
    """A scheduler whose plans are checked: no token of an image is computed before its embedding."""

    def __init__(self, splittable: bool = True, **knobs: int) -> None:
        self.splittable = splittable
        sizes = {"num_pages": 1000, "page_size": 4, "max_rows": 8, "max_step_tokens": 1000, "max_queue": 100} | knobs
        self.scheduler = Scheduler(mixed_limit=LIMIT, image_cost=COST, **sizes)
        self.added = 0
        self.computed: dict[int, int] = {}  # blocks of each image that steps compute, by its key
        self.costs: list[float] = []  # of the tower in each step
        self.keys: dict[int, list[int]] = {}  # of the images of each prompt

    def add(self, prompt: int, images: list[PlacedImage], new: int = 1) -> Sequence:
        self.added += 1
        self.keys[self.added] = [one.key for one in images]
        ids = packed([self.added] * prompt)
        sequence = Sequence(
            prompt=ids, params=SamplingParams(), seed=0, stop_ids=(), max_total=prompt + new, rank=(0.0, self.added),
            images=PromptImages(tuple(images), 0, self.splittable) if images else None,
            prompt_keys=ids if images else None,
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.check(plan)
        drawn = len(plan.sampled_rows)
        self.scheduler.commit(plan, StepResult(token_ids=[1] * drawn, finite=[True] * drawn, logprobs=None))
        return plan

    def check(self, plan: StepPlan) -> None:
        works = plan.encodings
        for new in plan.new_rows:  # after a preemption, its images are computed anew
            for key in self.keys[new.tokens[0]]:
                self.computed.pop(key, None)
        assert len({work.image.key for work in works}) == len(works)
        blocks = {one.image.key: one.blocks or BLOCKS - self.computed.get(one.image.key, 0) for one in works}
        assert all(blocks.values())
        self.costs.append(sum(COST.of_block(one.image) * blocks[one.image.key] for one in works))
        for key, count in blocks.items():
            self.computed[key] = self.computed.get(key, 0) + count
        for chunk in plan.prefill:
            assert len(chunk.token_ids) > 0
            for one in () if chunk.images is None else chunk.images.images:
                if one.start < chunk.start + len(chunk.token_ids) and one.end > chunk.start:
                    assert self.computed[one.key] == BLOCKS
                    assert self.splittable or one.end <= chunk.start + len(chunk.token_ids)

    def run(self) -> list[StepPlan]:
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        self.scheduler.check_integrity()
        return plans


def test_alone_an_image_is_computed_in_the_step_of_its_first_token() -> None:
    engine = Engine()
    one, two = image(3, 5, 10, key=1), image(100, 5, 10, key=2)
    engine.add(300, [one, two])
    [plan] = engine.run()
    assert plan.encodings == [ImageWork(one), ImageWork(two)]


def test_images_of_later_chunks_are_computed_in_later_steps() -> None:
    engine = Engine(max_step_tokens=500)
    images = [image(120 * i, 2, 10, key=i) for i in range(6)]  # each costs 80 tokens
    engine.add(720, images)
    plans = engine.run()
    assert len(plans) == 3  # the prompt alone needs two
    for plan in plans:
        [chunk] = plan.prefill
        end = chunk.start + len(chunk.token_ids)
        assert [work.image for work in plan.encodings] == [one for one in images if chunk.start <= one.start < end]


def test_a_step_without_streams_has_as_many_images_as_it_has_time_for() -> None:
    engine = Engine()
    for key in range(8):
        engine.add(30, [image(5, 2, 10, key=key)])
    plans = engine.run()
    assert [len(plan.encodings) for plan in plans] == [8]
    engine = Engine()
    for key in range(8):
        engine.add(60, [image(5, 5, 10, key=key)])  # costs 350, and 60 tokens
    assert [len(plan.encodings) for plan in engine.run()] == [2, 2, 2, 2]


def test_an_image_that_costs_more_than_a_step_is_computed_alone() -> None:
    engine = Engine()
    engine.add(40, [])
    engine.add(300, [image(5, 20, 10, key=1)])  # costs 4,400
    engine.add(20, [])
    plans = engine.run()
    assert [len(plan.encodings) for plan in plans] == [0, 1, 0]
    assert [plan.num_tokens for plan in plans] == [45, 1, 314]


@pytest.mark.parametrize("before", [0, 40])
def test_next_to_a_stream_a_large_image_takes_several_steps(before: int) -> None:
    engine = Engine()
    engine.add(4, [], new=60)
    engine.step()
    engine.costs.clear()
    engine.add(before + 200 + 10, [image(before, 20, 10, key=1)])
    plans = engine.run()
    assert all(plan.decode for plan in plans)
    assert sum(engine.costs) == pytest.approx(4400)
    assert max(engine.costs) <= 440  # a block is more than a step has time for
    busy = [plan for plan in plans if plan.encodings]
    assert len(busy) == BLOCKS
    assert [work.blocks for plan in busy for work in plan.encodings] == [1] * (BLOCKS - 1) + [0]
    assert sum(len(chunk.token_ids) for plan in plans for chunk in plan.prefill) == before + 210


def test_next_to_a_stream_blocks_and_tokens_share_the_time() -> None:
    engine = Engine()
    engine.add(4, [], new=100)
    engine.step()
    engine.costs.clear()
    for key in range(6):
        engine.add(60, [image(5, 5, 10, key=key)])  # costs 350, so 35 a block, and 60 tokens
    plans = engine.run()
    spent = [cost + plan.num_tokens for cost, plan in zip(engine.costs, plans)]
    assert max(spent) <= LIMIT.tokens + 35
    assert [cost > 0 for cost in engine.costs].index(False) <= 11  # 2,460 in all, in steps of 256


def test_a_cached_prefix_needs_no_image() -> None:
    engine = Engine()
    first = engine.add(100, [image(5, 2, 10, key=1), image(50, 2, 10, key=2)])
    engine.run()
    engine.computed.clear()
    engine.added -= 1  # the same ids
    again = engine.add(100, [image(5, 2, 10, key=1), image(50, 2, 10, key=2)])
    [plan] = engine.run()
    assert again.cached == 96
    assert first.prompt == again.prompt
    assert plan.encodings == []
    engine.added -= 1
    cut = engine.add(60, [image(5, 2, 10, key=1), image(50, 2, 10, key=2)])
    cut.prompt_keys = cut.prompt[:58] + packed([999, 999])  # the cache ends within the second image
    [plan] = engine.run()
    assert [work.image.key for work in plan.encodings] == [2]


@pytest.mark.parametrize("splittable", [True, False])
def test_whatever_comes_no_token_is_computed_before_its_embedding(splittable: bool) -> None:
    """If images may not be split, no chunk ends within one."""
    for seed in range(30):
        rng = random.Random(seed)
        step = rng.choice([40 if splittable else 71, 200, 1000])  # 63 tokens of an image, and 8 rows
        engine = Engine(splittable, num_pages=rng.choice([120, 400]), max_step_tokens=step)
        key = 0
        for _ in range(12):
            images, tokens = [], rng.randint(0, 30)
            for _ in range(rng.choice([0, 1, 1, 3])):
                images.append(image(tokens, rng.randint(1, 7), rng.randint(1, 9), key=key))
                tokens, key = images[-1].end + rng.randint(0, 40), key + 1
            engine.add(tokens + rng.randint(1, 20), images, new=rng.choice([1, 5, 40]))
            for _ in range(rng.choice([0, 0, 3])):
                engine.step()
        engine.run()
        assert set(engine.computed.values()) <= {BLOCKS}
