"""The embeddings of a step's images: computed together, part by part, and without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from aengine.model.images.spec import ImageSpec
from aengine.model.towers.base import Embedding, PatchBatch, Tower
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.runtime.step.images import ImageEncoder
from aengine.step_plan import ImageWork, PrefillChunk, StepPlan
from tests.model.towers.checkpoints import picture, resized
from tests.model.towers.seeing_harness import embed
from tests.model.towers.test_towers import load, write_seeing


def placed(spec: ImageSpec, image: Image.Image, start: int, key: int) -> PlacedImage:
    plan = spec.plan(*image.size)
    pixels = resized(image, plan.width, plan.height, spec.resample).tobytes()
    gap = 1 if spec.placeholders.row_end else 0
    size = {"width": plan.width, "height": plan.height, "rows": plan.rows, "columns": plan.columns}
    return PlacedImage(digest=b"", pixels=pixels, start=start, key=key, gap=gap, **size)


def step(
    number: int, chunks: Sequence[tuple[int, int, PromptImages]] = (), works: Sequence[ImageWork] = ()
) -> StepPlan:
    """Return a plan with one decode. chunks: the first token, the end, and the images of each prompt."""
    prefill = [
        PrefillChunk(row=1 + row, start=start, token_ids=[0] * (end - start), samples=False, images=of)
        for row, (start, end, of) in enumerate(chunks)
    ]
    return StepPlan(
        step=number, new_rows=[], new_pages=[], decode=[0], prefill=prefill, page_copies=[], encodings=works
    )


class CountingTower(Tower):
    """A tower that notes its batches and blocks."""

    def __init__(self, tower: Tower) -> None:
        self._tower, self.blocks = tower, tower.blocks
        self.batches: list[tuple[int, ...]] = []
        self.computed = 0  # blocks

    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        self.batches.append(batch.lengths)
        made = yield from self._counted(self._tower.begin(batch, rehearsal))
        return made

    def _counted(self, embedding: Embedding) -> Embedding:
        while True:
            try:
                next(embedding)
            except StopIteration as stop:
                return stop.value
            self.computed += 1
            yield


PICTURES = [picture(40, 24, 1), picture(24, 64, 2), picture(40, 24, 3), picture(64, 64, 4)]


class Seen:
    """An encoder of small images, and what the tower computes of each image alone."""

    def __init__(self, case: str, folder: Path) -> None:
        write_seeing(case, folder)
        decoder = load(folder)
        assert decoder.config.images is not None
        assert decoder.tower is not None
        self.spec = decoder.config.images
        self.tower = CountingTower(decoder.tower)
        self.expected = []
        for one in PICTURES:
            made = embed(decoder, [one])
            self.expected.append(torch.cat((made.tokens, *made.deep), dim=1))
        self.encoder = self.made()

    def made(self) -> ImageEncoder:
        largest = self.spec.plan(*PICTURES[-1].size)
        return ImageEncoder(self.spec, self.tower, torch.float32, torch.device("cpu"), largest)

    def check(self, plan: StepPlan, wanted: Sequence[tuple[int, slice]]) -> Tensor:
        """Check the embeddings of a step: of which images, and which tokens of them. Returns its positions."""
        positions, rows, mutual = self.encoder.place(plan, torch.arange(plan.num_tokens))
        assert mutual is None
        assert rows is not None
        expected = torch.cat([self.expected[image][tokens] for image, tokens in wanted])
        torch.testing.assert_close(torch.cat((rows.tokens, *rows.deep), dim=1), expected, rtol=1e-4, atol=1e-4)
        return positions


@pytest.fixture(scope="module", params=["qwen3-vl", "mistral3"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def anew(seen: Seen) -> None:
    seen.encoder = seen.made()
    seen.tower.batches.clear()
    seen.tower.computed = 0


def prompt(seen: Seen, *numbers: int) -> PromptImages:
    """Return a prompt of images, with one token of text before each."""
    found: list[PlacedImage] = []
    for number in numbers:
        found.append(placed(seen.spec, PICTURES[number], (found[-1].end if found else 0) + 1, 100 + number))
    return PromptImages(tuple(found))


def test_images_of_a_step_are_computed_together(seen: Seen) -> None:
    one, two = prompt(seen, 0, 1), prompt(seen, 2, 0)
    plan = step(1, [(0, one.end, one), (0, two.end, two)])
    every = slice(None)
    seen.check(plan, [(0, every), (1, every), (2, every), (0, every)])
    sizes = sorted(seen.spec.plan(*PICTURES[number].size).tokens * seen.spec.merge**2 for number in (0, 1, 2))
    most = seen.spec.plan(*PICTURES[3].size).tokens * seen.spec.merge**2
    assert sum(seen.tower.batches, ()) == tuple(sizes)
    assert all(sum(batch) <= most or len(batch) == 1 for batch in seen.tower.batches)
    assert len(seen.tower.batches) < 3
    seen.check(plan, [(0, every), (1, every), (2, every), (0, every)])
    assert seen.encoder.computed == 3


def test_chunks_that_cut_images(seen: Seen) -> None:
    whole = prompt(seen, 0, 1)
    first, second = whole.images
    columns = first.columns + first.gap
    for cut in range(1, first.rows):
        plan = step(cut, [(1 + cut * columns, second.start + 2, whole)])
        seen.check(plan, [(0, slice(cut * first.columns, None)), (1, slice(0, 2))])
    assert seen.encoder.computed == 2


def test_a_tower_that_is_interrupted_computes_the_same(seen: Seen) -> None:
    of = prompt(seen, 1)
    [image] = of.images
    blocks = seen.tower.blocks
    for number in range(blocks):
        seen.encoder.advance(step(number, works=[ImageWork(image, blocks=1)]))
        assert seen.tower.computed == number + 1
    assert image.key not in seen.encoder._kept
    seen.encoder.advance(step(blocks, works=[ImageWork(image)]))
    assert image.key in seen.encoder._kept
    seen.check(step(9, [(0, of.end, of)]), [(1, slice(None))])
    assert seen.tower.computed == blocks
    assert len(seen.tower.batches) == 1


def test_a_step_completes_an_image_that_it_needs(seen: Seen) -> None:
    of = prompt(seen, 1, 2)
    plan = step(1, [(0, of.end, of)], [ImageWork(of.images[0], blocks=1)])
    seen.encoder.advance(plan)
    seen.check(plan, [(1, slice(None)), (2, slice(None))])
    assert seen.tower.computed == 2 * seen.tower.blocks


def test_an_image_that_no_step_goes_on_with_is_dropped(seen: Seen) -> None:
    of = prompt(seen, 1)
    seen.encoder.advance(step(1, works=[ImageWork(of.images[0], blocks=1)]))
    seen.encoder.advance(step(2))
    seen.check(step(3, [(0, of.end, of)]), [(1, slice(None))])
    assert seen.tower.computed == 1 + seen.tower.blocks


def test_positions_of_a_step_without_tokens_of_images(seen: Seen) -> None:
    """A text between two images has other positions than its indices, if positions are those of a grid."""
    of = prompt(seen, 0, 1)
    middle = of.images[0].end
    positions, rows, _ = seen.encoder.place(step(1, [(middle, middle + 1, of)]), torch.tensor([5, middle]))
    assert rows is None
    if seen.spec.grid_rope is None:
        assert positions.tolist() == [5, middle]
    else:
        after = 1 + max(of.images[0].rows, of.images[0].columns)
        assert positions.tolist() == [[5, after]] * 3
    assert seen.tower.batches == []


@pytest.mark.parametrize(("case", "everywhere"), [("gemma3", True), ("gemma4-plain", False)])
def test_tokens_that_see_all_of_their_image(case: str, everywhere: bool, tmp_path: Path) -> None:
    seen = Seen(case, tmp_path)
    of = prompt(seen, 0, 1)
    first, second = of.images
    # A cached prefix ends within the first image. Start-up cuts images that are longer than a step.
    plan = step(1, [(0, 1, of), (first.start + 4, second.start + 3, of)])
    _, _, mutual = seen.encoder.place(plan, torch.arange(plan.num_tokens))
    assert mutual is not None
    assert (mutual.first, mutual.everywhere) == (1, everywhere)  # after the decode
    assert mutual.ends.tolist() == [0, 0, *[first.end] * (first.end - first.start - 4), 0, *[second.end] * 3]
    assert [mutual.are_in(window) for window in (None, 16)] == [everywhere, True]
    _, _, mutual = seen.encoder.place(step(2, [(second.end, second.end + 5, of)]), torch.arange(6))
    assert mutual is None
