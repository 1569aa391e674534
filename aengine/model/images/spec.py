"""The description of a model's images as data. `read.py` makes it from the files of a checkpoint."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.model.images.resizing import ImagePlan, ResizeRule
from aengine.model.images.tower_specs import TowerSpec

# Layers in which all tokens of one image attend to each other, also to later ones. They may not be split by a chunk.
Mutual = Literal["none", "sliding", "all"]


class PixelValues(msgspec.Struct, frozen=True):
    """How the numbers of pixels, 0 to 255, become inputs of the tower: (factor * number - mean) / std."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Placeholders(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an image in a prompt."""

    marker: int  # the token that a chat template writes for an image
    token: int  # the token at the place of each embedding; may be outside the vocabulary
    fill: int = 0  # the id that embedding tables read at these places
    # What replaces the marker, before and after the tokens of the image: texts and ids of tokens.
    before: tuple[str | int, ...] = ()
    after: tuple[str | int, ...] = ()
    row_end: str = ""  # the text of the token after each row but the last
    last: str = ""  # the text of the token after the last row

    def ids(self, plan: ImagePlan, row_end: int | None = None, last: int | None = None) -> list[int]:
        """Return the ids of an image's tokens, without those before and after it.

        Embeddings belong at the places of `token`, in order. row_end, last: the ids of these tokens, if they have any.
        """
        row = [self.token] * plan.columns
        ids: list[int] = []
        for i in range(plan.rows):
            end = row_end if i + 1 < plan.rows else last
            ids += row if end is None else [*row, end]
        return ids


class GridRope(msgspec.Struct, frozen=True):
    """Rotation by three positions for each token: time, row and column.

    sections: the number of frequencies that belong to each.
    interleaved: whether frequencies alternate among the three, instead of standing one after the other.
    """

    sections: tuple[int, int, int]
    interleaved: bool

    def axes(self, frequencies: int) -> tuple[int, ...]:
        """Return which of the three positions each frequency is multiplied with."""
        time, rows, columns = self.sections
        if not self.interleaved:
            return (0,) * time + (1,) * rows + (2,) * columns
        ends = (0, 3 * rows, 3 * columns)
        return tuple(i % 3 if i < ends[i % 3] else 0 for i in range(frequencies))


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images."""

    rule: ResizeRule
    resample: int  # Pillow's number of the filter
    patch: int  # the side of a patch in pixels
    merge: int  # the side of a token in patches
    pixels: PixelValues
    placeholders: Placeholders
    mutual: Mutual = "none"
    grid_rope: GridRope | None = None  # None: the tokens of an image count like those of text
    tower: TowerSpec
    modules: tuple[str, ...]  # of the checkpoint, that belong to the tower
    unread: tuple[str, ...] = ()  # prefixes of their tensors that the tower does not use

    def plan(self, width: int, height: int) -> ImagePlan:
        """Return the size to resize an image to, and the grid of its tokens. Raises `InvalidRequestError`."""
        return self.rule.plan(width, height)

    @property
    def splittable(self) -> bool:
        """Whether a chunk of a prompt, or a cached prefix, may end within an image."""
        return self.mutual == "none"
