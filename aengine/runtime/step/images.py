"""Images of a step: the embeddings and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import MutualTokens
from aengine.config import EngineConfig
from aengine.model.blocks.step import ImageRows
from aengine.model.decoder import Decoder
from aengine.model.images.positions import grid_positions
from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.model.towers.base import Embedding, ImageEmbeddings, Tower, finish
from aengine.model.towers.patches import batch_images
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.runtime.step.image_memory import KeptEmbeddings, PixelUploads, largest_image
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan


class ImageEncoder:
    """Computes the embeddings of images with a model's tower, and keeps those that were computed last on the device.

    It only enqueues work, and never waits for the device.
    """

    def __init__(
        self, spec: ImageSpec, tower: Tower, dtype: torch.dtype, device: torch.device, largest: ImagePlan
    ) -> None:
        """dtype: the tower's. largest: as `largest_image` returns it."""
        self._spec = spec
        self._tower = tower
        self._dtype = dtype
        self._device = device
        self._most = largest.tokens  # of the images that the tower computes at once
        self._kept = KeptEmbeddings(largest.tokens, spec.tower.width, dtype, device)
        self._pixels = PixelUploads(3 * largest.width * largest.height, device)
        self._begun: tuple[int, Embedding] | None = None  # the key of an image of which some blocks are computed
        self.fill = spec.placeholders.fill  # the id of tokens of images, for tables that the embeddings do not replace
        self.rehearsing = False  # whether the tower leaves out most of its work; the results are undefined
        self.computed = 0  # how many images the tower has computed

    def forget(self) -> None:
        """Drop all embeddings."""
        self._kept.clear()
        self._begun = None

    def advance(self, plan: StepPlan) -> None:
        """Compute what `StepPlan.encodings` asks for.

        An image of which only some blocks were computed is dropped by the first step that does not go on with it.
        """
        works = {work.image.key: work for work in plan.encodings if work.image.key not in self._kept}
        if self._begun is not None and self._begun[0] not in works:
            self._begun = None
        for key, work in works.items():
            if work.blocks:
                if self._begun is None or self._begun[0] != key:
                    self._begun = key, self._begin([work.image], plan.step)
                for _ in range(work.blocks):
                    next(self._begun[1])
        for _ in self._embeddings([work.image for work in works.values() if not work.blocks], plan.step):
            pass

    def place(self, plan: StepPlan, positions: Tensor) -> tuple[Tensor, ImageRows | None, MutualTokens | None]:
        """Return the positions of a step's tokens, the embeddings of its images, and the tokens that see later ones.

        positions: [tokens] int64, of tokens of text. The result is [3, tokens] if tokens of images have a row and a
        column.
        """
        at: list[NDArray[np.int64]] = []
        needed: list[tuple[PlacedImage, slice]] = []  # the images, and which of their tokens
        grids: list[tuple[int, NDArray[np.int64]]] = []
        ends = np.zeros(0 if self._spec.splittable else plan.num_tokens, np.int64)  # as in `MutualTokens`
        first = plan.decode_tokens
        for chunk in plan.prefill:
            start, end = chunk.start, chunk.start + len(chunk.token_ids)
            if chunk.images is not None:
                if self._spec.grid_rope is not None:
                    grids.append((first, _grid(chunk.images, start, end)))
                for image in chunk.images.images:
                    if image.start < end and start < image.end:
                        places = _places(image)
                        low, high = map(int, np.searchsorted(places, (start, end)))
                        at.append(places[low:high] - start + first)
                        needed.append((image, slice(low, high)))
                        if not self._spec.splittable:
                            ends[first + max(image.start - start, 0) : first + min(image.end, end) - start] = image.end
            first += end - start
        if not grids and not needed:
            return positions, None, None
        numbers = upload(np.concatenate([*at, *(grid.reshape(-1) for _, grid in grids), ends]), self._device)
        total = sum(map(len, at))
        sent = numbers[total:]
        if grids:
            positions = positions.expand(3, -1).clone()
            for begin, grid in grids:
                positions[:, begin : begin + grid.shape[1]] = sent[: grid.size].view(3, -1)
                sent = sent[grid.size :]
        if not total:
            return positions, None, None
        tokens, *deep = self._gather(needed, total, plan.step).split(self._spec.tower.out, dim=1)
        mutual = None if self._spec.splittable else MutualTokens(sent, len(plan.decode), self._spec.mutual == "all")
        return positions, ImageRows(numbers[:total], tokens, tuple(deep)), mutual

    def _gather(self, needed: Sequence[tuple[PlacedImage, slice]], total: int, step: int) -> Tensor:
        """Return the embeddings of some tokens of images, [total, width]. Images that are not kept are computed."""
        rows = torch.empty((total, self._spec.tower.width), dtype=self._dtype, device=self._device)
        missing: dict[int, PlacedImage] = {}
        places: dict[int, list[tuple[int, slice]]] = {}  # of missing images
        first = 0
        for image, tokens in needed:  # those that are kept come first: what is computed may replace them
            count = tokens.stop - tokens.start
            if image.key in self._kept:
                rows[first : first + count] = self._kept.get(image.key)[tokens]
            else:
                missing[image.key] = image
                places.setdefault(image.key, []).append((first, tokens))
            first += count
        for image, made in self._embeddings(missing.values(), step):
            for start, tokens in places[image.key]:
                rows[start : start + tokens.stop - tokens.start] = made[tokens]
        return rows

    def _embeddings(self, images: Iterable[PlacedImage], step: int) -> Iterator[tuple[PlacedImage, Tensor]]:
        """Compute whole images and keep them. Yields each with its embeddings, [tokens, width]."""
        rest = []
        for image in images:
            if self._begun is not None and self._begun[0] == image.key:
                yield image, self._finish(image, self._begun[1])
            else:
                rest.append(image)
        for batch in _batches(rest, self._most):
            made = _joined(finish(self._begin(batch, step)))
            for image, one in zip(batch, made.split([image.rows * image.columns for image in batch])):
                self._keep(image, one)
                yield image, one

    def _begin(self, images: Sequence[PlacedImage], step: int) -> Embedding:
        pixels = [self._pixels.upload(image.pixels, step).view(image.height, image.width, 3) for image in images]
        batch = batch_images(list(zip(pixels, map(_plan, images))), self._spec, self._dtype)
        return self._tower.begin(batch, self.rehearsing)

    def _finish(self, image: PlacedImage, embedding: Embedding) -> Tensor:
        made = _joined(finish(embedding))
        self._begun = None
        self._keep(image, made)
        return made

    def _keep(self, image: PlacedImage, made: Tensor) -> None:
        self._kept.put(image.key, made)
        self.computed += 1


def make_encoder(config: EngineConfig, decoder: Decoder) -> ImageEncoder | None:
    """Return the encoder for a decoder. None: it has no tower."""
    spec, largest = decoder.config.tower, largest_image(config, decoder.config)
    if spec is None or largest is None or decoder.tower is None:
        return None
    return ImageEncoder(spec, decoder.tower, decoder.dtype, decoder.device, largest)


def _batches(images: Sequence[PlacedImage], most: int) -> Iterator[list[PlacedImage]]:
    """Divide images into batches of at most `most` tokens. Images of one size follow each other."""
    batch: list[PlacedImage] = []
    tokens = 0
    for image in sorted(images, key=lambda image: (image.rows * image.columns, image.rows)):
        count = image.rows * image.columns
        if batch and tokens + count > most:
            yield batch
            batch, tokens = [], 0
        batch.append(image)
        tokens += count
    if batch:
        yield batch


def _joined(made: ImageEmbeddings) -> Tensor:
    """Return all that a tower has computed of each token, [tokens, width]."""
    return torch.cat((made.tokens, *made.deep), dim=1) if made.deep else made.tokens


def _plan(image: PlacedImage) -> ImagePlan:
    return ImagePlan(image.width, image.height, image.rows, image.columns)


def _grid(images: PromptImages, start: int, end: int) -> NDArray[np.int64]:
    """Return the positions of a chunk's tokens up to the last one of an image, [3, tokens]."""
    pieces: list[int | ImagePlan] = []
    before = 0
    for image in images.images:
        pieces += [image.start - before, _plan(image)]
        before = image.end
    return grid_positions(pieces, start, end)[0]


def _places(image: PlacedImage) -> NDArray[np.int64]:
    """Return the indices in the prompt of the tokens that have an embedding."""
    index = np.arange(image.rows * image.columns)
    return image.start + index + index // image.columns * image.gap
