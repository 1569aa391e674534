"""Images of a step: the embeddings and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.cache.recently_used import RecentlyUsed
from aengine.model.blocks.step import ImageRows
from aengine.model.images.positions import grid_positions
from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.model.towers.base import ImageEmbeddings, Tower
from aengine.model.towers.patches import batch_images
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.step_plan import StepPlan

KEPT_BYTES = 2**28  # of embeddings; a chunk that needs evicted ones computes them again


class ImageEncoder:
    """Computes the embeddings of images with a model's tower, and keeps those that were used last on the device."""

    def __init__(self, spec: ImageSpec, tower: Tower, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: the tower's."""
        self._spec = spec
        self._tower = tower
        self._dtype = dtype
        self._device = device
        self.fill = spec.placeholders.fill  # the id of tokens of images, for tables that the embeddings do not replace
        self._kept: RecentlyUsed[int, ImageEmbeddings] = RecentlyUsed(KEPT_BYTES)  # by key
        self.computed = 0  # how many images the tower has computed

    def place(
        self, plan: StepPlan, positions: Tensor, upload: Callable[[Sequence[int]], Tensor]
    ) -> tuple[Tensor, ImageRows | None]:
        """Return the positions of a step's tokens, and the embeddings of its images.

        positions: [tokens] int64, of tokens of text. The result is [3, tokens] if tokens of images have a row and a
        column.
        """
        at: list[int] = []
        parts: list[ImageEmbeddings] = []
        grids: list[tuple[int, NDArray[np.int64]]] = []
        first = plan.decode_tokens
        for chunk in plan.prefill:
            start, end = chunk.start, chunk.start + len(chunk.token_ids)
            if chunk.images is not None:
                if self._spec.grid_rope is not None:
                    grids.append((first, _grid(chunk.images)[:, start:end]))
                for image in chunk.images.images:
                    places = _places(image)
                    low, high = np.searchsorted(places, (start, end))
                    if low < high:
                        at += (places[low:high] - start + first).tolist()
                        parts.append(_part(self._embeddings(image), slice(int(low), int(high))))
            first += end - start
        if grids:
            positions = positions.expand(3, -1).clone()
            for begin, grid in grids:
                positions[:, begin : begin + grid.shape[1]] = torch.tensor(grid, device=self._device)
        if not parts:
            return positions, None
        deep = tuple(torch.cat(layer) for layer in zip(*(part.deep for part in parts)))
        return positions, ImageRows(upload(at), torch.cat([part.tokens for part in parts]), deep)

    def _embeddings(self, image: PlacedImage) -> ImageEmbeddings:
        """Return the embeddings of a whole image."""
        if (kept := self._kept.get(image.key)) is not None:
            return kept
        pixels = torch.tensor(np.frombuffer(image.pixels, np.uint8), device=self._device)
        plan = ImagePlan(image.width, image.height, image.rows, image.columns)
        batch = batch_images([(pixels.view(image.height, image.width, 3), plan)], self._spec, self._dtype)
        made = self._tower(batch)
        self._kept.put(image.key, made, sum(one.nbytes for one in (made.tokens, *made.deep)))
        self.computed += 1
        return made


def _grid(images: PromptImages) -> NDArray[np.int64]:
    """Return the positions of a prompt's tokens up to the last one of an image, [3, tokens]."""
    pieces: list[int | ImagePlan] = []
    end = 0
    for image in images.images:
        pieces += [image.start - end, ImagePlan(image.width, image.height, image.rows, image.columns)]
        end = image.end
    return grid_positions(pieces)[0]


def _places(image: PlacedImage) -> NDArray[np.int64]:
    """Return the indices in the prompt of the tokens that have an embedding."""
    index = np.arange(image.rows * image.columns)
    return image.start + index + index // image.columns * image.gap


def _part(embeddings: ImageEmbeddings, tokens: slice) -> ImageEmbeddings:
    return ImageEmbeddings(embeddings.tokens[tokens], tuple(layer[tokens] for layer in embeddings.deep))
