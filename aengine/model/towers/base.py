"""The interface of towers. A tower turns images into embeddings, which a decoder reads instead of those of tokens.

Patches of an image are ordered by token: first all patches of the token at row 0 and column 0, row by row, then those
of the token at row 0 and column 1, and so on. So the patches that become one token follow each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.model.images.resizing import ImagePlan


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """The patches of several images, one image after the other."""

    rows: Tensor  # [patches, 3 * patch * patch]: of each patch channel, row and column, as `patch_rows` makes them
    places: Tensor  # [patches, 4] int64: row and column of the patch, and rows and columns of its image, in patches
    lengths: tuple[int, ...]  # the number of patches of each image


@dataclass(frozen=True, slots=True)
class ImageEmbeddings:
    """The output of a tower for a batch of images."""

    tokens: Tensor  # [tokens, hidden]: take the place of the tokens' embeddings, after a factor of embeddings
    deep: tuple[Tensor, ...] = ()  # [tokens, hidden] each: added to the residual stream after the first layers


Embedding = Generator[None, None, ImageEmbeddings]  # a tower that computes a batch, and pauses after each block


class Tower(ABC):
    """A tower whose weights are loaded. Only its launches depend on the sizes of images; it never waits for a device.

    Every rank of a model has the whole tower.
    """

    blocks: int  # how many layers it has

    @abstractmethod
    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        """Return a generator that computes a batch. It yields after each block, and returns the embeddings.

        Args:
            batch: Images do not see each other. Their embeddings are in the same order.
            rehearsal: Compute only blocks that need kernels or memory of their own. The results are undefined.
        """
        ...

    def __call__(self, batch: PatchBatch) -> ImageEmbeddings:
        """Return the embeddings of all images, in the order of the batch."""
        return finish(self.begin(batch))


def finish(embedding: Embedding) -> ImageEmbeddings:
    """Compute all that a generator of `Tower.begin` has left."""
    while True:
        try:
            next(embedding)
        except StopIteration as stop:
            made: ImageEmbeddings = stop.value
            return made


def patch_places(plans: Sequence[ImagePlan], merge: int, device: torch.device) -> Tensor:
    """Return `PatchBatch.places` of images. merge: the side of a token in patches."""
    if not plans:
        return torch.empty(0, 4, dtype=torch.int64, device=device)
    return torch.cat([_places(plan, merge, device) for plan in plans])


def _places(plan: ImagePlan, merge: int, device: torch.device) -> Tensor:
    height, width = plan.rows * merge, plan.columns * merge
    rows, columns = (torch.arange(size, device=device) for size in (height, width))
    shape = (plan.rows, merge, plan.columns, merge)
    by_row, by_column = torch.meshgrid(rows, columns, indexing="ij")
    places = [one.reshape(shape).transpose(1, 2).flatten() for one in (by_row, by_column)]
    sizes = [torch.full_like(places[0], size) for size in (height, width)]
    return torch.stack((*places, *sizes), dim=1)
